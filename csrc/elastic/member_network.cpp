#include "elastic/member_network.h"

#include <algorithm>
#include <utility>

#include "elastic/elastic_codec.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

constexpr size_t kMostUnsent = size_t{64} << 20U;
constexpr std::chrono::seconds kConnectWithin{2};

// Of what both ends say until they know who the other one is.
constexpr FrameHeader kProofHeader{FrameType::kMember};

std::vector<FrameType> spokenTypes() {
  return {FrameType::kMember, FrameType::kElastic, FrameType::kCall, FrameType::kAnswer,
          FrameType::kGoodbye};
}

Loss lossOf(Liveness answer) {
  switch (answer) {
    case Liveness::kGone:
      return Loss::kDead;
    case Liveness::kSilent:
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
  for (auto& [number, incoming] : incoming_) loop_.cancel(incoming.prove_by);
  for (auto& [id, peer] : peers_) {
    loop_.cancel(peer.again);
    loop_.cancel(peer.prove_by);
  }
}

std::string MemberNetwork::open(const SocketAddress& address, PortRange ports) {
  std::string error;
  listener_ = Listener::open(loop_, address, ports, &error, incarnation_, newLocalAddress());
  if (!listener_) return error;
  return {};
}

void MemberNetwork::admitClients(const Nonce& nonce, Listener::Handler handler) {
  listener_->expect(nonce, GenerationSecret{}, std::move(handler));
}

void MemberNetwork::admitMembers(const JobKey& key) {
  nonce_ = key.nonce;
  keys_.setJob(key.secret);
  listener_->expect(nonce_, GenerationSecret{},
                    [this](Arrival& arrival) { return admit(arrival); });
}

void MemberNetwork::enterView(const View& view) {
  keys_.enter(view, self_.id);
  renewConnections();
}

// Who has to prove more by now than it did: the other end connects anew, and so does this one.
void MemberNetwork::renewConnections() {
  std::vector<uint64_t> dropped;
  for (const auto& [number, incoming] : incoming_) {
    const MemberId& from = incoming.from.id;
    if (!from.isZero() && !keys_.stillHolds(from, incoming.proved_by)) dropped.push_back(number);
  }
  for (const uint64_t number : dropped) drop(number);
  for (auto& [id, peer] : peers_) {
    if (!peer.is_proved || keys_.stillHolds(id, peer.proved_by)) continue;
    closeOutgoing(peer);
    if (!peer.probe && !finishing_) connect(id);
  }
}

std::vector<SocketAddress> MemberNetwork::addresses() const {
  std::vector<SocketAddress> all = listener_->addresses();
  return all;
}

void MemberNetwork::setSelf(const Member& self) {
  self_ = self;
}

// ---- incoming

bool MemberNetwork::admit(Arrival& arrival) {
  const auto is_unproven = [](const auto& one) { return one.second.from.id.isZero(); };
  if (std::count_if(incoming_.begin(), incoming_.end(), is_unproven) >= kMostUnproven) {
    drop(std::find_if(incoming_.begin(), incoming_.end(), is_unproven)->first);  // the oldest
  }
  const uint64_t number = next_incoming_++;
  FramedSocket::Handlers handlers;
  handlers.on_frame = [this, number](const FrameHeader& header, std::string payload) {
    onFrame(number, header, std::move(payload));
  };
  handlers.on_end = [this, number](const std::string&) { onIncomingEnd(number); };
  auto socket = std::make_unique<FramedSocket>(loop_, std::move(arrival.fd),
                                               std::vector<FrameType>{FrameType::kMember},
                                               std::move(handlers), kMostUnsent);
  Incoming& incoming = incoming_[number];
  incoming.socket = std::move(socket);
  incoming.challenge = Challenge::random();
  incoming.prove_by = loop_.runAt(proveBy(), [this, number] { drop(number); });
  incoming.socket->send(kProofHeader, encodeQuestion({incoming.challenge, keys_.newest()}));
  return true;
}

// False: it is not who it says to be.
bool MemberNetwork::letIn(Incoming& incoming, const std::string& payload) {
  const auto claim = decodeClaim(payload);
  if (!claim || !decodeRecord(claim->member.record) || claim->member.id.isZero() ||
      claim->member.id == self_.id || keys_.contradictsRoster(claim->member)) {
    return false;
  }
  const ProvedConnection connection{incoming.challenge, claim->challenge, self_.id,
                                    claim->member.id, claim->view};
  const auto proved_by = keys_.provedBy(ConnectionEnd::kConnector, connection, claim->proof);
  if (!proved_by) return false;
  incoming.proved_by = *proved_by;
  loop_.cancel(std::exchange(incoming.prove_by, 0));
  incoming.socket->expect(spokenTypes());
  incoming.from = claim->member;
  introduce(incoming.from);
  const ConnectionProof own = keys_.prove(ConnectionEnd::kAcceptor, connection);
  incoming.socket->send(kProofHeader, encodeProof(own));
  return true;
}

void MemberNetwork::drop(uint64_t number) {
  const auto node = incoming_.extract(number);
  if (!node.empty()) loop_.cancel(node.mapped().prove_by);
}

void MemberNetwork::onFrame(uint64_t number, const FrameHeader& header, std::string payload) {
  Incoming& incoming = incoming_.at(number);
  const bool claims = header.type == FrameType::kMember;
  if (incoming.from.id.isZero() || claims) {
    if (!incoming.from.id.isZero() || !claims || !letIn(incoming, payload)) drop(number);
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
  drop(number);
  for (const auto& [other, incoming] : incoming_) {
    if (incoming.from.id == from) return;  // it has connected anew
  }
  if (from.isZero()) return;
  ask(from);
  events_->on_disconnected(from);
}

// ---- outgoing

void MemberNetwork::introduce(const Member& member) {
  const auto record = decodeRecord(member.record);
  if (!record || member.id == self_.id) return;
  Peer& peer = peers_[member.id];
  const bool moved = !peer.member.id.isZero() && peer.member.record != member.record;
  peer.member = member;
  peer.record = *record;
  if (moved) reopen(member.id);
}

// Whoever is at the address that it had until now is not, or no more, that member. What was to be
// said there is not said at the new one: it asks again.
void MemberNetwork::reopen(const MemberId& id) {
  Peer& peer = peers_.at(id);
  const bool was_open = peer.out || peer.dial;
  loop_.cancel(std::exchange(peer.again, 0));
  peer.dial.reset();
  peer.probe.reset();
  peer.failed_dials = 0;
  peer.unproved_since.reset();
  closeOutgoing(peer);
  if (!std::exchange(peer.waiting, {}).empty()) peer.was_connected = true;
  if (was_open && !finishing_) connect(id);
}

Member MemberNetwork::memberOf(const MemberId& id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? Member() : found->second.member;
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
  if (peer.is_proved) {
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
  if (!peer.out && !peer.dial && !peer.probe && peer.again == 0) connect(to);
}

bool MemberNetwork::hasUnsent(const MemberId& id) const {
  const auto found = peers_.find(id);
  return found != peers_.end() && !found->second.waiting.empty();
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
  hello.nonce = nonce_;
  hello.from = incarnation_;
  hello.to = peer.record.incarnation;
  hello.rank = 0;
  const Welcome expected{{}, peer.record.incarnation};
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
  FramedSocket::Handlers handlers;
  handlers.on_frame = [this, id](const FrameHeader&, const std::string& payload) {
    onProofFrame(id, payload);
  };
  handlers.on_end = [this, id](const std::string&) { onOutgoingEnd(id); };
  closeOutgoing(peer);
  peer.out = std::make_unique<FramedSocket>(loop_, std::move(result.fd),
                                            std::vector<FrameType>{FrameType::kMember},
                                            std::move(handlers), kMostUnsent);
  peer.prove_by = loop_.runAt(proveBy(), [this, id] { onOutgoingEnd(id); });
}

Clock::time_point MemberNetwork::proveBy() const {
  return Clock::now() + std::max<Duration>(kProveWithin, limit_);
}

// The acceptor's question, then its proof; it says no more on this connection.
void MemberNetwork::onProofFrame(const MemberId& id, const std::string& payload) {
  Peer& peer = peers_.at(id);
  if (!peer.proving) {
    if (const auto question = decodeQuestion(payload)) return claim(id, *question);
  } else if (!peer.is_proved) {
    const auto proof = decodeProof(payload);
    const auto by =
        proof ? keys_.provedBy(ConnectionEnd::kAcceptor, *peer.proving, *proof) : std::nullopt;
    if (by) return onProved(id, *by);
  }
  onOutgoingEnd(id);
}

void MemberNetwork::claim(const MemberId& id, const ConnectionQuestion& question) {
  Peer& peer = peers_.at(id);
  const ProvedConnection connection{question.challenge, Challenge::random(), id, self_.id,
                                    keys_.viewFor(question.newest)};
  peer.proving = connection;
  FrameHeader header;
  header.type = FrameType::kMember;
  peer.out->send(header, encodeClaim({self_, connection.by_connector, connection.view,
                                      keys_.prove(ConnectionEnd::kConnector, connection)}));
}

void MemberNetwork::onProved(const MemberId& id, const ViewName& by) {
  Peer& peer = peers_.at(id);
  loop_.cancel(std::exchange(peer.prove_by, 0));
  peer.is_proved = true;
  peer.proved_by = by;
  peer.unproved_since.reset();
  peer.failed_dials = 0;
  for (auto& [waiting, payload] : std::exchange(peer.waiting, {})) peer.out->send(waiting, payload);
  if (std::exchange(peer.was_connected, true)) events_->on_connected(id);
}

void MemberNetwork::closeOutgoing(Peer& peer) {
  loop_.cancel(std::exchange(peer.prove_by, 0));
  peer.proving.reset();
  peer.is_proved = false;
  peer.out.reset();
}

void MemberNetwork::onOutgoingEnd(const MemberId& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  if (!peer.is_proved) {
    ++peer.failed_dials;
    if (!peer.unproved_since) peer.unproved_since = Clock::now();
  }
  closeOutgoing(peer);
  if (!finishing_) ask(id);
}

void MemberNetwork::ask(const MemberId& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second.probe || finishing_) return;
  Peer& peer = found->second;
  const std::optional<SocketAddress> address = probedAt(peer.record);
  if (!address) return;
  ProbePatience patience;
  patience.connect = limit_;
  peer.probe = std::make_unique<Probe>(
      loop_, ProbeQuestion{selfIncarnation(), peer.record.incarnation, {*address}}, patience,
      [this, id](const ProbeAnswer& answer) { onProbed(id, answer); });
}

void MemberNetwork::onProbed(const MemberId& id, const ProbeAnswer& answer) {
  Peer& peer = peers_.at(id);
  peer.probe.reset();
  if (answer.liveness == Liveness::kAlive && events_->on_alive) events_->on_alive(id);
  if (answer.liveness == Liveness::kAlive || answer.liveness == Liveness::kUnknown) {
    if (!peer.out && !peer.dial) connectLater(id);  // kUnknown: this process's own trouble
    if (isLostUnproved(peer)) {
      peer.unproved_since = Clock::now();  // told once for each such time
      events_->on_lost(id, Loss::kUnreachable,
                       "it answers, and does not prove that it is this member");
    }
    return;
  }
  if (!std::exchange(peer.waiting, {}).empty()) peer.was_connected = true;
  events_->on_lost(id, lossOf(answer.liveness), answer.detail);
}

// Views change between two tries, so a few that fail mean nothing.
bool MemberNetwork::isLostUnproved(const Peer& peer) const {
  return peer.unproved_since && Clock::now() - *peer.unproved_since > limit_ + kProveWithin;
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
    loop_.cancel(peer.second.prove_by);
    return true;
  });
}

// ---- the end

void MemberNetwork::sayGoodbye() {
  FrameHeader header;
  header.type = FrameType::kGoodbye;
  for (auto& [id, peer] : peers_) {
    if (peer.is_proved) peer.out->send(header, {});
  }
}

void MemberNetwork::finish() {
  finishing_ = true;
  listener_.reset();
  for (auto& [id, peer] : peers_) {
    peer.dial.reset();
    peer.probe.reset();
    if (!peer.is_proved) closeOutgoing(peer);
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
