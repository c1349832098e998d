#include "host/shared_greeting.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "host/shared_board.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

constexpr size_t kMostMembers = 64;
constexpr uint8_t kHere = 1;
constexpr uint8_t kNothing = 0;

// All slots of a generation fit into a third-level cache of 8 MiB.
size_t slotBytesOf(int size) {
  constexpr size_t kKibi = 1024;
  if (size <= 4) return 256 * kKibi;
  if (size <= 8) return 128 * kKibi;
  return std::max<size_t>(32, 1024 / static_cast<size_t>(size)) * kKibi;
}

bool listensLocally(const MemberRecord& member) {
  return std::any_of(member.addresses.begin(), member.addresses.end(),
                     [](const SocketAddress& address) {
                       return address.isLocal() && isReachableFromHere(address);
                     });
}

}  // namespace

bool SharedGreeting::isFor(const Roster& roster) {
  return roster.members.size() > 1 && roster.members.size() <= kMostMembers &&
         std::all_of(roster.members.begin(), roster.members.end(), [](const MemberRecord& member) {
           return member.shares_memory && listensLocally(member);
         });
}

SharedGreeting::SharedGreeting(EventLoop& loop, int rank, int size) : loop_(loop) {
  memory_ = SharedMemory::reserve(size, SharedBoard::regionBytes(slotBytesOf(size)), &why_);
  if (memory_ && !memory_->mapOwn(rank, &why_)) memory_.reset();
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

void SharedGreeting::say(int channel) {
  uint8_t said = memory_ ? kHere : kNothing;
  iovec data{&said, 1};
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
  if (::sendmsg(channel, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1) return;
  // Over TCP, or with too many descriptors under way. A channel that has ended tells of that
  // itself.
  cannot("its descriptor could not be passed: " +
         std::error_code(errno, std::generic_category()).message());
  said = kNothing;
  if (::send(channel, &said, 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) return;
}

void SharedGreeting::hear(int peer) {
  const auto found = waiting_.find(peer);
  if (found == waiting_.end()) return;
  UniqueFd descriptor;
  if (!receive(found->second.channel.get(), &descriptor)) return;
  Waiting met = std::move(found->second);
  waiting_.erase(found);
  loop_.unwatch(met.channel.get());
  if (!descriptor) {
    cannot("rank " + std::to_string(peer) + " passed no memory");
  } else if (memory_) {
    std::string why;
    if (!memory_->mapPeer(peer, std::move(descriptor), &why))
      cannot("the memory of rank " + std::to_string(peer) + ": " + why);
  }
  met.met(std::move(met.channel));
}

// One byte: what follows is the connection's.
bool SharedGreeting::receive(int channel, UniqueFd* descriptor) {
  uint8_t said = kNothing;
  iovec data{&said, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<uint8_t, CMSG_SPACE(sizeof(int))> control{};
  message.msg_control = control.data();
  message.msg_controllen = CMSG_LEN(sizeof(int));  // room for one
  const ssize_t count = ::recvmsg(channel, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  const cmsghdr* header = count == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
  const bool passed = header != nullptr && header->cmsg_level == SOL_SOCKET &&
                      header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int));
  if (!passed) return true;
  int got = -1;
  std::memcpy(&got, CMSG_DATA(header), sizeof(int));
  UniqueFd held(got);
  if (said == kHere) *descriptor = std::move(held);
  return true;
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
