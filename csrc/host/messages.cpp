#include "host/messages.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "host/message_table.h"
#include "host/schedule.h"
#include "host/turn.h"

namespace torchft_ext {
namespace {

// Sends that nobody receives cost memory here: far more than a program that works has outstanding.
constexpr size_t kMostAnnounced = size_t{1} << 20;

// Messages travel in pieces: one that has begun when the generation fails is completed from a copy,
// so that the notice of the failure can follow it (connection.h, closeAfterTexts).
constexpr size_t kPieceBytes = size_t{256} << 10;

FrameHeader headerOf(FrameType type, uint64_t number) {
  FrameHeader header;
  header.type = type;
  header.seq = number;
  return header;
}

Receipt breakWith(std::string why) {
  Receipt receipt;
  receipt.kind = Receipt::Kind::kBreak;
  receipt.why = std::move(why);
  return receipt;
}

Receipt receiptOf(Receipt::Kind kind, uint8_t* into = nullptr) {
  Receipt receipt;
  receipt.kind = kind;
  receipt.into = into;
  return receipt;
}

}  // namespace

struct Messages::Impl {
  struct Expected {
    PendingOp op;
    uint64_t arrived = 0;  // bytes
  };
  struct PeerMessages {
    Connection* connection = nullptr;
    std::map<uint64_t, PendingOp> sends;    // by number: announced, and perhaps under way
    std::set<uint64_t> cleared;             // of these: the receiver has asked for the bytes
    std::map<uint64_t, Expected> expected;  // by the sender's number: recvs that were cleared
    uint64_t next_number = 0;
    uint64_t next_announced = 0;
    bool left = false;
  };

  Impl(int own_rank, const std::vector<Connection*>& connections, Callbacks calls)
      : rank(own_rank), peers(connections.size()), callbacks(std::move(calls)) {
    for (size_t i = 0; i < connections.size(); ++i) peers[i].connection = connections[i];
  }

  PeerMessages& peer(int index) { return peers[static_cast<size_t>(index)]; }
  const PeerMessages& peer(int index) const { return peers[static_cast<size_t>(index)]; }

  void announced(const Announced& announcement, uint64_t tag);
  void match(PendingOp recv, const Announced& announcement);
  void handOver(PendingOp recv, const Announced& announcement);
  void hasReceived(PendingOp recv);
  void store();
  void startSending(int to, uint64_t number);
  void hasSent(int to, uint64_t number);
  void failSizes(const PendingOp& recv, const Announced& announcement);
  void failTypes(const PendingOp& recv, const Announced& announcement);
  void failSignatures(const PendingOp& recv, const Announced& announcement);
  void begin(PendingOp send);
  void post(PendingOp recv);
  void fail(int culprit, const PendingOp* op, std::string how);
  bool isLastLeft(int index) const;

  const int rank;
  std::vector<PeerMessages> peers;
  MessageTable table;
  const Callbacks callbacks;
  std::deque<PendingOp> storing;  // received, on their way to where the callers want them
  bool over = false;              // failed or cancelled: nothing more is done
  const std::shared_ptr<bool> alive =
      std::make_shared<bool>(true);  // for tasks that may outlive this
};

void Messages::Impl::announced(const Announced& announcement, uint64_t tag) {
  if (auto recv = table.takePostedFor(announcement, tag)) {
    match(std::move(*recv), announcement);
  } else if (table.announcedBy(announcement.peer) >= kMostAnnounced) {
    fail(announcement.peer, nullptr,
         "it announced " + std::to_string(kMostAnnounced) +
             " sends that this rank does not receive");
  } else {
    table.keep(announcement, tag);
  }
}

void Messages::Impl::match(PendingOp recv, const Announced& announcement) {
  const bool nothing = announcement.bytes == 0 && !recv.transfer;  // it has no items
  if (!nothing && recv.signature() != announcement.signature)
    return failSignatures(recv, announcement);
  if (recv.operation.outputs[0].bytes != announcement.bytes) return failSizes(recv, announcement);
  if (recv.state) {
    recv.state->setSourceRank(announcement.peer);
    recv.state->noteStarted();
  }
  if (announcement.peer == rank) return handOver(std::move(recv), announcement);
  PeerMessages& from = peer(announcement.peer);
  from.expected.emplace(announcement.number, Expected{std::move(recv)});
  from.connection->sendText(headerOf(FrameType::kClear, announcement.number), {});
}

// A send to oneself.
void Messages::Impl::handOver(PendingOp recv, const Announced& announcement) {
  const auto found = peer(rank).sends.find(announcement.number);
  const PendingOp send = std::move(found->second);
  peer(rank).sends.erase(found);
  const Buffer& to = recv.operation.outputs[0];
  if (to.bytes > 0) std::memmove(to.data, send.operation.inputs[0].data, to.bytes);
  send.complete();
  hasReceived(std::move(recv));
}

// One after the other; a long copy goes on in other turns.
void Messages::Impl::hasReceived(PendingOp recv) {
  storing.push_back(std::move(recv));
  if (storing.size() == 1) store();
}

void Messages::Impl::store() {
  while (!storing.empty()) {
    if (!copySome(storing.front().operation.stores)) {
      callbacks.later([this, weak = std::weak_ptr<bool>(alive)] {
        if (!weak.expired()) store();
      });
      return;
    }
    const PendingOp done = std::move(storing.front());
    storing.pop_front();
    done.complete();
  }
}

void Messages::Impl::startSending(int to, uint64_t number) {
  const PendingOp& send = peer(to).sends.at(number);
  if (send.state) send.state->noteStarted();
  const Buffer payload = send.operation.inputs[0];
  FrameHeader header = headerOf(FrameType::kMessage, number);
  uint64_t offset = 0;
  do {
    header.aux = offset;
    header.length = std::min<uint64_t>(kPieceBytes, payload.bytes - offset);
    const bool last = offset + header.length == payload.bytes;
    peer(to).connection->send(
        header, payload.data + offset,
        last ? std::function<void()>([this, to, number] { hasSent(to, number); }) : nullptr);
    offset += header.length;
  } while (offset < payload.bytes);
}

void Messages::Impl::hasSent(int to, uint64_t number) {
  PeerMessages& receiver = peer(to);
  const auto found = receiver.sends.find(number);
  if (found == receiver.sends.end()) return;
  const PendingOp done = std::move(found->second);
  receiver.sends.erase(found);
  receiver.cleared.erase(number);
  done.complete();
}

void Messages::Impl::failSizes(const PendingOp& recv, const Announced& announcement) {
  fail(
      announcement.peer, &recv,
      "it sends " + std::to_string(announcement.bytes) + " bytes (" +
          (recv.transfer ? recv.transfer->described : "tag " + std::to_string(recv.operation.tag)) +
          "), but the matching recv on rank " + std::to_string(rank) + " expects " +
          std::to_string(recv.operation.outputs[0].bytes) + " bytes");
  table.post(recv);  // for cancelAll(): it is still pending
}

void Messages::Impl::failSignatures(const PendingOp& recv, const Announced& announcement) {
  if (!recv.transfer) return failTypes(recv, announcement);
  fail(announcement.peer, &recv,
       "it issued " + describeSignature(announcement.signature) + ", where rank " +
           std::to_string(rank) + " has " + describeSignature(recv.signature()) + ": " +
           recv.transfer->described);
  table.post(recv);  // as above
}

void Messages::Impl::failTypes(const PendingOp& recv, const Announced& announcement) {
  fail(announcement.peer, &recv,
       "it issued " + describeSignature(announcement.signature) + " (tag " +
           std::to_string(recv.operation.tag) + "), but the matching recv on rank " +
           std::to_string(rank) + " expects " +
           nameOfItems(recv.operation.dtype, recv.operation.torch_dtype));
  table.post(recv);  // as above
}

void Messages::Impl::fail(int culprit, const PendingOp* op, std::string how) {
  over = true;
  Failure failure;
  failure.kind = FailureKind::kMismatch;
  failure.cause.rank = culprit;
  failure.cause.how = std::move(how);
  if (op != nullptr) {
    failure.op = op->transfer ? op->transfer->described : toString(op->operation.kind);
    if (op->state) failure.seq = op->state->seq();
  }
  callbacks.failed(std::move(failure));
}

bool Messages::Impl::isLastLeft(int index) const {
  for (size_t other = 0; other < peers.size(); ++other) {
    const bool may_send = peers[other].connection != nullptr && !peers[other].left;
    if (may_send && static_cast<int>(other) != index) return false;
  }
  return true;
}

Messages::Messages(int rank, const std::vector<Connection*>& connections, Callbacks callbacks)
    : impl_(std::make_unique<Impl>(rank, connections, std::move(callbacks))) {}

Messages::~Messages() = default;

void Messages::send(std::shared_ptr<OpState> state, Operation operation) {
  impl_->begin({std::move(state), std::move(operation)});
}

void Messages::recv(std::shared_ptr<OpState> state, Operation operation) {
  impl_->post({std::move(state), std::move(operation)});
}

void Messages::transfer(Operation operation, std::shared_ptr<const Transfer> transfer) {
  const bool sends = operation.kind == OpKind::kSend;
  PendingOp op{nullptr, std::move(operation), std::move(transfer)};
  sends ? impl_->begin(std::move(op)) : impl_->post(std::move(op));
}

void Messages::Impl::begin(PendingOp send) {
  const int to = send.operation.peer;
  PeerMessages& receiver = peer(to);
  const uint64_t number = receiver.next_number++;
  const uint64_t tag = send.operation.tag;
  const uint64_t bytes = send.operation.inputs[0].bytes;
  const uint64_t signature = send.signature();
  receiver.sends.emplace(number, std::move(send));
  if (over) return;
  if (to == rank) {
    announced({to, number, bytes, signature}, tag);
    return;
  }
  FrameHeader header = headerOf(FrameType::kAnnounce, number);
  header.tag = tag;
  header.aux = bytes;
  ByteWriter payload;
  payload.u64(signature);
  std::string text = payload.take();
  header.length = text.size();
  receiver.connection->sendText(header, std::move(text));
}

void Messages::Impl::post(PendingOp recv) {
  std::optional<Announced> announcement;
  if (!over) announcement = table.takeAnnouncedFor(recv.operation);
  if (announcement) {
    match(std::move(recv), *announcement);
  } else {
    table.post(std::move(recv));
  }
}

Receipt Messages::onHeader(int peer, const FrameHeader& header) {
  if (impl_->over) return receiptOf(Receipt::Kind::kWait);
  Impl::PeerMessages& from = impl_->peer(peer);
  if (header.type == FrameType::kMessage) {
    const auto found = from.expected.find(header.seq);
    if (found == from.expected.end()) return breakWith("a message that was not asked for");
    const Buffer& into = found->second.op.operation.outputs[0];
    const uint64_t arrived = found->second.arrived;
    const uint64_t expected = std::min<uint64_t>(kPieceBytes, into.bytes - arrived);
    if (header.aux != arrived || header.length != expected) {
      return breakWith("a message of another size than announced");
    }
    return receiptOf(Receipt::Kind::kInto, into.data + arrived);
  }
  if (header.length != (header.type == FrameType::kAnnounce ? sizeof(uint64_t) : 0))
    return breakWith("an announcement with a payload of another size");
  if (header.type == FrameType::kAnnounce && header.seq != from.next_announced) {
    return breakWith("send " + std::to_string(header.seq) + " was announced instead of " +
                     std::to_string(from.next_announced));
  }
  if (header.type == FrameType::kClear &&
      (from.sends.count(header.seq) == 0 || from.cleared.count(header.seq) != 0)) {
    return breakWith("it asks for a send that is not waiting");
  }
  return receiptOf(Receipt::Kind::kText);
}

void Messages::onFrame(int peer, const FrameHeader& header) {
  if (impl_->over) return;
  Impl::PeerMessages& from = impl_->peer(peer);
  const auto found = from.expected.find(header.seq);
  if (found == from.expected.end()) return;
  found->second.arrived += header.length;
  if (found->second.arrived < found->second.op.operation.outputs[0].bytes) return;
  PendingOp done = std::move(found->second.op);
  from.expected.erase(found);
  impl_->hasReceived(std::move(done));
}

void Messages::onText(int peer, const FrameHeader& header, const std::string& payload) {
  if (impl_->over) return;
  Impl::PeerMessages& from = impl_->peer(peer);
  if (header.type == FrameType::kAnnounce) {
    ++from.next_announced;
    const uint64_t signature = ByteReader(payload).u64();
    impl_->announced({peer, header.seq, header.aux, signature}, header.tag);
  } else if (header.type == FrameType::kClear) {
    from.cleared.insert(header.seq);
    impl_->startSending(peer, header.seq);
  }
}

bool Messages::idle() const {
  if (!impl_->table.nothingPosted() || !impl_->storing.empty()) return false;
  for (const Impl::PeerMessages& peer : impl_->peers) {
    if (!peer.sends.empty() || !peer.expected.empty()) return false;
  }
  return true;
}

bool Messages::needs(int peer) const {
  const Impl::PeerMessages& from = impl_->peer(peer);
  if (!from.sends.empty() || !from.expected.empty()) return true;
  if (impl_->table.hasPostedFor(peer)) return true;
  return impl_->table.hasPostedForAny() && impl_->isLastLeft(peer);
}

Messages::Unmatched Messages::unmatched(const OpState& op) const {
  const auto of_engine = [](const PendingOp& pending) {
    return (pending.operation.tag & kEngineTag) != 0;
  };
  const PendingOp* recv = impl_->table.findPosted(op);
  Unmatched found;
  for (size_t i = 0; i < impl_->peers.size(); ++i) {
    const Impl::PeerMessages& peer = impl_->peers[i];
    if (peer.connection == nullptr) continue;
    const int rank = static_cast<int>(i);
    if (recv != nullptr) {
      found.of_engine = of_engine(*recv);
      const bool from_any = recv->operation.peer < 0;
      if (from_any ? !peer.left : recv->operation.peer == rank) found.peers.push_back(rank);
      continue;
    }
    for (const auto& [number, send] : peer.sends) {
      if (send.state.get() != &op || peer.cleared.count(number) != 0) continue;
      return {{rank}, of_engine(send)};
    }
  }
  return found;
}

void Messages::peerLeft(int peer) {
  impl_->peer(peer).left = true;
  impl_->table.forgetAnnouncedBy(peer);
}

std::vector<std::pair<std::shared_ptr<OpState>, Operation>> Messages::cancelAll() {
  impl_->over = true;
  std::vector<std::pair<std::shared_ptr<OpState>, Operation>> all;
  const auto take = [&all](PendingOp& op) {
    if (op.state) all.emplace_back(std::move(op.state), std::move(op.operation));
  };
  for (PendingOp& op : impl_->table.takeAllPosted()) take(op);
  for (PendingOp& op : impl_->storing) take(op);
  impl_->storing.clear();
  for (Impl::PeerMessages& peer : impl_->peers) {
    for (auto& [number, op] : peer.sends) take(op);
    for (auto& [number, expected] : peer.expected) take(expected.op);
    peer.sends.clear();
    peer.expected.clear();
    peer.cleared.clear();
  }
  return all;
}

}  // namespace torchft_ext
