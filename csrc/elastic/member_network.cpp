#include "elastic/member_network.h"

#include <algorithm>
#include <utility>

#include "elastic/elastic_codec.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

constexpr size_t kMostUnsent = size_t{64} << 20U;
constexpr std::chrono::seconds kConnectWithin{2};

std::vector<FrameType> spokenTypes() {
  return {FrameType::kMember, FrameType::kElastic, FrameType::kCall, FrameType::kAnswer,
          FrameType::kGoodbye};
}

Loss lossOf(Probe::Answer answer) {
  switch (answer) {
    case Probe::Answer::kGone:
      return Loss::kDead;
    case Probe::Answer::kSilent:
      return Loss::kFrozen;
    default:
      return Loss::kUnreachable;
  }
}

// The one to try after so many failures; the cheapest comes first.
const SocketAddress* reachable(const MemberRecord& record, size_t failures) {
  std::vector<const SocketAddress*> reached;
  for (const SocketAddress& address : record.addresses) {
    if (isReachableFromHere(address)) reached.push_back(&address);
  }
  return reached.empty() ? nullptr : reached[failures % reached.size()];
}

// Only TCP addresses tell whether a process lives.
std::optional<SocketAddress> probedAt(const MemberRecord& record) {
  for (const SocketAddress& address : record.addresses) {
    if (!address.isLocal()) return address;
  }
  return std::nullopt;
}

}  // namespace

MemberNetwork::MemberNetwork(EventLoop& loop, Duration limit, Events events)
    : loop_(loop), limit_(limit), events_(std::make_shared<const Events>(std::move(events))) {}

MemberNetwork::~MemberNetwork() {
  for (auto& [id, peer] : peers_) loop_.cancel(peer.again);
}

std::string MemberNetwork::open(const SocketAddress& address, PortRange ports) {
  std::string error;
  listener_ = Listener::open(loop_, address, ports, &error, incarnation_, newLocalAddress());
  if (!listener_) return error;
  return {};
}

void MemberNetwork::admitVisitors(const Nonce& nonce, Listener::Handler handler) {
  listener_->expect(nonce, GenerationSecret{}, std::move(handler));
}

void MemberNetwork::admitMembers(const JobKey& key) {
  key_ = key;
  listener_->expect(key_.nonce, key_.secret, [this](Arrival& arrival) { return admit(arrival); });
}

std::vector<SocketAddress> MemberNetwork::addresses() const {
  std::vector<SocketAddress> all = listener_->addresses();
  return all;
}

void MemberNetwork::setSelf(const Member& self) {
  self_ = self;
  if (const auto record = decodeRecord(self.record)) own_record_ = *record;
}

// ---- incoming

bool MemberNetwork::admit(Arrival& arrival) {
  const uint64_t number = next_incoming_++;
  FramedSocket::Handlers handlers;
  handlers.on_frame = [this, number](const FrameHeader& header, std::string payload) {
    onFrame(number, header, std::move(payload));
  };
  handlers.on_end = [this, number](const std::string&) { onIncomingEnd(number); };
  auto socket = std::make_unique<FramedSocket>(loop_, std::move(arrival.fd), spokenTypes(),
                                               std::move(handlers), kMostUnsent);
  incoming_[number].socket = std::move(socket);
  return true;
}

void MemberNetwork::onFrame(uint64_t number, const FrameHeader& header, std::string payload) {
  Incoming& incoming = incoming_.at(number);
  if (header.type == FrameType::kMember) {
    ByteReader reader(payload);
    const Member member = readMember(reader);
    if (!reader.atEnd() || !decodeRecord(member.record)) {
      incoming_.erase(number);
      return;
    }
    incoming.from = member;
    introduce(member);
    return;
  }
  if (incoming.from.id.isZero()) {
    incoming_.erase(number);
    return;
  }
  const MemberId from = incoming.from.id;
  if (!peers_.contains(from)) introduce(incoming.from);  // it is to be answered
  if (header.type == FrameType::kGoodbye) {
    events_->on_goodbye(from);
    return;
  }
  events_->on_message(from, header, std::move(payload));
}

void MemberNetwork::onIncomingEnd(uint64_t number) {
  const MemberId from = incoming_.at(number).from.id;
  incoming_.erase(number);
  for (const auto& [other, incoming] : incoming_) {
    if (incoming.from.id == from) return;  // it has connected anew
  }
  if (!from.isZero()) ask(from);
}

// ---- outgoing

void MemberNetwork::introduce(const Member& member) {
  const auto record = decodeRecord(member.record);
  if (!record || member.id == self_.id) return;
  Peer& peer = peers_[member.id];
  peer.member = member;
  peer.record = *record;
}

std::optional<MemberRecord> MemberNetwork::recordOf(const MemberId& id) const {
  const auto found = peers_.find(id);
  if (id == self_.id) return own_record_;
  return found == peers_.end() ? std::nullopt : std::optional(found->second.record);
}

void MemberNetwork::send(const MemberId& to, FrameHeader header, std::string payload) {
  add(to, header, std::move(payload));
  flush();
}

void MemberNetwork::flush() {
  for (const MemberId& id : std::exchange(unflushed_, {})) {
    const auto found = peers_.find(id);
    if (found != peers_.end() && found->second.out) found->second.out->flush();
  }
}

void MemberNetwork::add(const MemberId& to, FrameHeader header, std::string payload) {
  const auto found = peers_.find(to);
  if (found == peers_.end() || finishing_) return;
  Peer& peer = found->second;
  if (peer.out) {
    peer.out->add(header, payload);
    if (std::find(unflushed_.begin(), unflushed_.end(), to) == unflushed_.end()) {
      unflushed_.push_back(to);
    }
    return;
  }
  if (peer.waiting.size() < kMostWaiting) {
    peer.waiting.emplace_back(header, std::move(payload));
  } else {
    peer.was_connected = true;  // what is dropped has to be said again
  }
  if (!peer.dial && !peer.probe && peer.again == 0) connect(to);
}

void MemberNetwork::prepare(const MemberId& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || finishing_) return;
  const Peer& peer = found->second;
  if (!peer.out && !peer.dial && !peer.probe && peer.again == 0) connect(id);
}

void MemberNetwork::connect(const MemberId& id) {
  Peer& peer = peers_.at(id);
  const SocketAddress* address = reachable(peer.record, peer.failed_dials);
  if (address == nullptr) return;
  Hello hello;
  hello.nonce = key_.nonce;
  hello.proof = key_.secret.connector;
  hello.from = incarnation_;
  hello.to = peer.record.incarnation;
  hello.rank = 0;
  const Welcome expected{key_.secret.acceptor, peer.record.incarnation};
  peer.dial = std::make_unique<Dial>(
      loop_, *address, hello, expected, Deadline::after(kConnectWithin), limit_,
      [this, id](Dial::Result result) { onDialled(id, std::move(result)); });
}

void MemberNetwork::onDialled(const MemberId& id, Dial::Result result) {
  Peer& peer = peers_.at(id);
  peer.dial.reset();
  if (result.end != Dial::End::kWelcomed) {
    ++peer.failed_dials;
    ask(id);
    return;
  }
  peer.failed_dials = 0;
  FramedSocket::Handlers handlers;
  handlers.on_frame = [](const FrameHeader&, const std::string&) {};
  handlers.on_end = [this, id](const std::string&) { onOutgoingEnd(id); };
  peer.out = std::make_unique<FramedSocket>(loop_, std::move(result.fd), std::vector<FrameType>{},
                                            std::move(handlers), kMostUnsent);
  ByteWriter writer;
  write(writer, self_);
  FrameHeader header;
  header.type = FrameType::kMember;
  peer.out->send(header, writer.take());
  for (auto& [waiting, payload] : std::exchange(peer.waiting, {})) peer.out->send(waiting, payload);
  if (std::exchange(peer.was_connected, true)) events_->on_connected(id);
}

void MemberNetwork::onOutgoingEnd(const MemberId& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  found->second.out.reset();
  if (!finishing_) ask(id);
}

void MemberNetwork::ask(const MemberId& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second.probe || finishing_) return;
  Peer& peer = found->second;
  const std::optional<SocketAddress> address = probedAt(peer.record);
  if (!address) return;
  peer.probe =
      std::make_unique<Probe>(loop_, *address, peer.record.incarnation, Deadline::after(limit_),
                              [this, id](Probe::Answer answer, const std::string& detail) {
                                onProbed(id, answer, std::string(detail));  // the probe goes
                              });
}

void MemberNetwork::onProbed(const MemberId& id, Probe::Answer answer, const std::string& detail) {
  Peer& peer = peers_.at(id);
  peer.probe.reset();
  if (answer == Probe::Answer::kAnswered) {
    if (!peer.out && !peer.dial) connectLater(id);
    return;
  }
  if (answer == Probe::Answer::kUnknown) {  // this process's own trouble
    connectLater(id);
    return;
  }
  if (!std::exchange(peer.waiting, {}).empty()) peer.was_connected = true;
  const Loss loss = lossOf(answer);
  events_->on_lost(id, loss, detail);
}

// At once after a connection that stood; else a while after the last try.
void MemberNetwork::connectLater(const MemberId& id) {
  constexpr milliseconds kLongestPause{50};
  Peer& peer = peers_.at(id);
  if (peer.failed_dials == 0) {
    connect(id);
    return;
  }
  const milliseconds pause =
      std::min(kLongestPause, milliseconds(1) * (1 << std::min<size_t>(peer.failed_dials, 6)));
  loop_.cancel(peer.again);
  peer.again = loop_.runAt(Clock::now() + pause, [this, id] {
    const auto found = peers_.find(id);
    if (found == peers_.end()) return;
    found->second.again = 0;
    if (!found->second.out && !found->second.dial && !finishing_) connect(id);
  });
}

void MemberNetwork::keepOnly(const std::set<MemberId>& ids) {
  std::erase_if(peers_, [&](const auto& peer) {
    if (ids.contains(peer.first)) return false;
    loop_.cancel(peer.second.again);
    return true;
  });
}

// ---- the end

void MemberNetwork::sayGoodbye() {
  FrameHeader header;
  header.type = FrameType::kGoodbye;
  for (auto& [id, peer] : peers_) {
    if (peer.out) peer.out->send(header, {});
  }
}

void MemberNetwork::finish() {
  finishing_ = true;
  listener_.reset();
  for (auto& [id, peer] : peers_) {
    peer.dial.reset();
    peer.probe.reset();
    if (peer.out) peer.out->finishSending();
  }
}

bool MemberNetwork::finished() const {
  for (const auto& [id, peer] : peers_) {
    if (peer.out) return false;
  }
  return true;
}

}  // namespace torchft_ext
