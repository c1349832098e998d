#include "host/shared_greeting.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "host/cores.h"
#include "host/shared_board.h"
#include "net/frame.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

constexpr size_t kGreetingBytes =
    sizeof(uint8_t) + sizeof(uint16_t) + sizeof(SharedPlanTable::Digests);
constexpr int kMostCores = 65535;

bool listensLocally(const MemberRecord& member) {
  return std::any_of(member.addresses.begin(), member.addresses.end(),
                     [](const SocketAddress& address) {
                       return address.isLocal() && isReachableFromHere(address);
                     });
}

}  // namespace

std::optional<int> SharedGreeting::firstWithout(const Roster& roster) {
  if (roster.members.size() > kMostSharing) return kMostSharing;
  for (size_t rank = 0; rank < roster.members.size(); ++rank) {
    const MemberRecord& member = roster.members[rank];
    if (!member.shares_memory || !listensLocally(member)) return static_cast<int>(rank);
  }
  return std::nullopt;
}

std::string SharedGreeting::whyNotFor(const Roster& roster, int rank) {
  if (roster.members.size() > kMostSharing)
    return "there are more than " + std::to_string(kMostSharing) + " ranks";
  const int without = firstWithout(roster).value_or(rank);
  const bool is_own = without == rank;
  const std::string who = is_own ? "this rank" : "rank " + std::to_string(without);
  if (roster.members[static_cast<size_t>(without)].shares_memory)
    return who + (is_own ? " has no Unix socket" : " is on another host, or has no Unix socket");
  return who + " has turned off shared memory, or local sockets";
}

SharedGreeting::SharedGreeting(EventLoop& loop, int rank, int size, const SharedPlanTable& plans)
    : loop_(loop), rank_(rank), size_(size) {
  memory_ = SharedMemory::reserve(size, SharedBoard::regionBytes(sharedSlotBytes(size)), &why_);
  if (memory_ && !memory_->mapOwn(rank, &why_)) memory_.reset();
  greetings_[rank] = {memory_ != nullptr, usableCores(), plans.digests()};
}

SharedGreeting::~SharedGreeting() {
  if (!loop_.inLoop()) return;  // it has ended, with all it watched
  for (const auto& [peer, waiting] : waiting_) loop_.unwatch(waiting.channel.get());
}

void SharedGreeting::greet(int peer, UniqueFd channel, std::function<void(UniqueFd)> met) {
  say(channel.get());
  const int fd = channel.get();
  loop_.watch(fd, EPOLLIN | EPOLLRDHUP, [this, peer](uint32_t) { hear(peer); });
  waiting_[peer] = {std::move(channel), std::move(met)};
}

std::string SharedGreeting::encode(const Greeting& greeting) {
  ByteWriter writer;
  writer.u8(greeting.shares ? 1 : 0);
  writer.u16(static_cast<uint16_t>(std::min(greeting.cores, kMostCores)));
  for (const uint32_t digest : greeting.plans) writer.u32(digest);
  return writer.take();
}

std::optional<SharedGreeting::Greeting> SharedGreeting::decode(std::string_view bytes) {
  ByteReader reader(bytes);
  Greeting greeting;
  greeting.shares = reader.u8() == 1;
  greeting.cores = reader.u16();
  for (uint32_t& digest : greeting.plans) digest = reader.u32();
  return reader.atEnd() ? std::optional(greeting) : std::nullopt;
}

void SharedGreeting::say(int channel) {
  Greeting own = greetings_[rank_];
  own.shares = memory_ != nullptr;
  std::string bytes = encode(own);
  iovec data{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int))> control{};
  if (memory_) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int descriptor = memory_->ownDescriptor();
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  // The first bytes of a connection: its buffer takes all of them.
  const ssize_t sent = ::sendmsg(channel, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(bytes.size())) return;
  // Over TCP, or with too many descriptors under way. A channel that has ended tells of that
  // itself.
  cannot("its descriptor could not be passed: " +
         std::error_code(errno, std::generic_category()).message());
  own.shares = false;
  bytes = encode(own);
  const ssize_t said = ::send(channel, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (said != static_cast<ssize_t>(bytes.size())) return;
}

void SharedGreeting::hear(int peer) {
  const auto found = waiting_.find(peer);
  if (found == waiting_.end() || !receive(found->second)) return;
  Waiting met = std::move(found->second);
  waiting_.erase(found);
  loop_.unwatch(met.channel.get());
  const auto greeting = decode(met.heard);
  if (greeting) greetings_[peer] = *greeting;
  if (!greeting || !greeting->shares || !met.descriptor) {
    cannot("rank " + std::to_string(peer) + " passed no memory");
  } else if (memory_) {
    std::string why;
    if (!memory_->mapPeer(peer, std::move(met.descriptor), &why))
      cannot("the memory of rank " + std::to_string(peer) + ": " + why);
  }
  met.met(std::move(met.channel));
}

// No byte more: what follows is the connection's.
bool SharedGreeting::receive(Waiting& from) {
  std::array<char, kGreetingBytes> bytes;
  iovec data{bytes.data(), bytes.size() - from.heard.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int))> control{};
  message.msg_control = control.data();
  message.msg_controllen = CMSG_LEN(sizeof(int));  // room for one
  const ssize_t count = ::recvmsg(from.channel.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (count <= 0) return true;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  const bool passed = header != nullptr && header->cmsg_level == SOL_SOCKET &&
                      header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int));
  if (passed) {
    int got = -1;
    std::memcpy(&got, CMSG_DATA(header), sizeof(int));
    from.descriptor = UniqueFd(got);
  }
  from.heard.append(bytes.data(), static_cast<size_t>(count));
  return from.heard.size() == kGreetingBytes;
}

bool SharedGreeting::fewCores() const {
  return std::any_of(greetings_.begin(), greetings_.end(),
                     [this](const auto& each) { return each.second.cores < size_; });
}

std::optional<SharedGreeting::OtherPlans> SharedGreeting::otherPlans() const {
  const auto first = greetings_.begin();
  const auto other = std::find_if(first, greetings_.end(), [&](const auto& each) {
    return each.second.plans != first->second.plans;
  });
  if (other == greetings_.end()) return std::nullopt;
  std::map<uint32_t, std::string> ranks;  // by digest
  for (const auto& [rank, greeting] : greetings_) {
    std::string& named = ranks[digestOf(greeting.plans)];
    named += (named.empty() ? "" : ", ") + std::to_string(rank);
  }
  std::string how = "its plans of collectives in shared memory differ for " +
                    nameDifferences(first->second.plans, other->second.plans);
  for (const auto& [digest, named] : ranks)
    how += "; digest " + std::to_string(digest) + " on ranks " + named;
  how += "; give all members the same TORCHFT_EXT_SHARED_MEMORY_PLANS";
  return OtherPlans{other->first, how};
}

void SharedGreeting::cannot(const std::string& why) {
  if (!memory_) return;
  why_ = why;
  memory_.reset();
}

std::shared_ptr<SharedMemory> SharedGreeting::memory() {
  if (memory_) memory_->closeOwnDescriptor();
  return memory_;
}

}  // namespace torchft_ext
