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
  for (auto& [id, client] : clients_) loop_.cancel(client.timer);
}

bool MeetingServer::hasRoom() const {
  if (report_ && clients_.size() >= kMostAskers) return false;
  const auto unproven = std::count_if(clients_.begin(), clients_.end(),
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
  Client& client = clients_[id];
  client.socket = std::move(socket);
  client.challenge = Challenge::random();
  client.timer = loop_.runAt(Clock::now() + kProveWithin, [this, id] { onEnd(id); });
  ByteWriter writer;
  writer.raw(client.challenge.bytes);
  client.socket->send(headerOf(FrameType::kAnswer, 0), writer.take());
  return true;
}

void MeetingServer::onFrame(const MemberId& id, const FrameHeader& header,
                            const std::string& payload) {
  Client& client = clients_.at(id);
  const bool asks = header.type == FrameType::kInquiry;
  if (!client.proven) {
    if (asks || !prove(client, payload)) onEnd(id);
    return;
  }
  if (asks != (report_ != nullptr)) return onEnd(id);
  if (asks) return onInquiry(id);
  auto call = decodeStoreCall(payload);
  if (!call || call->view != 0 || header.seq == 0) return onEnd(id);
  const std::string& key = call->keys.empty() ? std::string() : call->keys.front();
  if (call->what == StoreCall::What::kSet && key.starts_with("seat/")) client.seats.insert(key);
  store_.onCall(id, header.seq, *std::move(call));
}

void MeetingServer::onInquiry(const MemberId& id) {
  clients_.at(id).socket->send(headerOf(FrameType::kJobReport, 0), report_());
}

bool MeetingServer::prove(Client& client, const std::string& payload) {
  ByteReader reader(payload);
  Challenge theirs;
  Digest256 proof{};
  reader.raw(theirs.bytes);
  reader.raw(proof);
  const Digest256 expected = meetingProof(key_, MeetingSide::kClient, client.challenge, theirs);
  if (!reader.atEnd() || !equalInConstantTime(proof, expected)) return false;
  client.proven = true;
  if (!report_) loop_.cancel(std::exchange(client.timer, 0));
  ByteWriter writer;
  writer.raw(meetingProof(key_, MeetingSide::kPlace, theirs, client.challenge));
  writer.u8(static_cast<uint8_t>(standing_.part));
  writer.u64(standing_.view);
  client.socket->send(headerOf(FrameType::kAnswer, 0), writer.take());
  return true;
}

void MeetingServer::onEnd(const MemberId& id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  const Client gone = std::move(found->second);
  clients_.erase(found);
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
  while (worse && !clients_.empty()) onEnd(clients_.begin()->first);
}

void MeetingServer::put(const std::string& key, const std::string& value) {
  StoreCall set;
  set.what = StoreCall::What::kSet;
  set.keys = {key};
  set.value = value;
  store_.onCall({}, next_put_++, std::move(set));
}

void MeetingServer::reply(const MemberId& to, uint64_t number, const StoreAnswer& answer) {
  const auto found = clients_.find(to);
  if (found == clients_.end()) return;
  found->second.socket->send(headerOf(FrameType::kAnswer, number), encodeStoreAnswer(answer));
}

}  // namespace torchft_ext
