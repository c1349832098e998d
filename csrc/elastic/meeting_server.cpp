#include "elastic/meeting_server.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {
namespace {

constexpr size_t kMostUnsent = size_t{64} << 20U;

FrameHeader headerOf(FrameType type, uint64_t number) {
  FrameHeader header;
  header.type = type;
  header.seq = number;
  return header;
}

}  // namespace

MeetingServer::MeetingServer(EventLoop& loop, MeetingKey key)
    : loop_(loop),
      key_(std::move(key)),
      store_([this](const MemberId& to, uint64_t number, const StoreAnswer& answer) {
        reply(to, number, answer);
      }) {}

MeetingServer::~MeetingServer() {
  for (auto& [id, visitor] : visitors_) loop_.cancel(visitor.timer);
}

bool MeetingServer::hasRoom() const {
  if (report_ && visitors_.size() >= kMostAskers) return false;
  const auto unproven = std::count_if(visitors_.begin(), visitors_.end(),
                                      [](const auto& one) { return !one.second.proven; });
  return static_cast<size_t>(unproven) < kMostUnproven;
}

bool MeetingServer::admit(Arrival& arrival) {
  if (!hasRoom()) return false;
  const MemberId id = MemberId::random();
  FramedSocket::Handlers handlers;
  handlers.on_frame = [this, id](const FrameHeader& header, const std::string& payload) {
    onFrame(id, header, payload);
  };
  handlers.on_end = [this, id](const std::string&) { onEnd(id); };
  auto socket = std::make_unique<FramedSocket>(
      loop_, std::move(arrival.fd), std::vector<FrameType>{FrameType::kCall, FrameType::kInquiry},
      std::move(handlers), kMostUnsent);
  Visitor& visitor = visitors_[id];
  visitor.socket = std::move(socket);
  visitor.challenge = Challenge::random();
  visitor.timer = loop_.runAt(Clock::now() + kProveWithin, [this, id] { onEnd(id); });
  ByteWriter writer;
  writer.raw(visitor.challenge.bytes);
  visitor.socket->send(headerOf(FrameType::kAnswer, 0), writer.take());
  return true;
}

void MeetingServer::onFrame(const MemberId& id, const FrameHeader& header,
                            const std::string& payload) {
  Visitor& visitor = visitors_.at(id);
  const bool asks = header.type == FrameType::kInquiry;
  if (!visitor.proven) {
    if (asks || !prove(visitor, payload)) onEnd(id);
    return;
  }
  if (asks != (report_ != nullptr)) return onEnd(id);
  if (asks) return onInquiry(id);
  auto call = decodeStoreCall(payload);
  if (!call || call->view != 0 || header.seq == 0) return onEnd(id);
  const std::string& key = call->keys.empty() ? std::string() : call->keys.front();
  if (call->what == StoreCall::What::kSet && key.starts_with("seat/")) visitor.seats.insert(key);
  store_.onCall(id, header.seq, *std::move(call));
}

void MeetingServer::onInquiry(const MemberId& id) {
  visitors_.at(id).socket->send(headerOf(FrameType::kJobReport, 0), report_());
}

bool MeetingServer::prove(Visitor& visitor, const std::string& payload) {
  ByteReader reader(payload);
  Challenge theirs;
  Digest256 proof{};
  reader.raw(theirs.bytes);
  reader.raw(proof);
  const Digest256 expected = meetingProof(key_, MeetingSide::kVisitor, visitor.challenge, theirs);
  if (!reader.atEnd() || !equalInConstantTime(proof, expected)) return false;
  visitor.proven = true;
  if (!report_) loop_.cancel(std::exchange(visitor.timer, 0));
  ByteWriter writer;
  writer.raw(meetingProof(key_, MeetingSide::kPlace, theirs, visitor.challenge));
  writer.u8(static_cast<uint8_t>(standing_.part));
  writer.u64(standing_.view);
  visitor.socket->send(headerOf(FrameType::kAnswer, 0), writer.take());
  return true;
}

void MeetingServer::onEnd(const MemberId& id) {
  const auto found = visitors_.find(id);
  if (found == visitors_.end()) return;
  const Visitor gone = std::move(found->second);
  visitors_.erase(found);
  loop_.cancel(gone.timer);
  for (const std::string& seat : gone.seats) {
    StoreCall remove;
    remove.what = StoreCall::What::kRemove;
    remove.keys = {seat};
    store_.onCall({}, next_put_++, std::move(remove));
  }
}

void MeetingServer::setStanding(const Standing& standing) {
  const bool worse = standing < standing_;
  standing_ = standing;
  while (worse && !visitors_.empty()) onEnd(visitors_.begin()->first);
}

void MeetingServer::put(const std::string& key, const std::string& value) {
  StoreCall set;
  set.what = StoreCall::What::kSet;
  set.keys = {key};
  set.value = value;
  store_.onCall({}, next_put_++, std::move(set));
}

void MeetingServer::reply(const MemberId& to, uint64_t number, const StoreAnswer& answer) {
  const auto found = visitors_.find(to);
  if (found == visitors_.end()) return;
  found->second.socket->send(headerOf(FrameType::kAnswer, number), encodeStoreAnswer(answer));
}

}  // namespace torchft_ext
