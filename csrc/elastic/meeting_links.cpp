#include "elastic/meeting_links.h"

#include <utility>

namespace torchft_ext {
namespace {

constexpr size_t kMostUnsent = size_t{64} << 20U;
constexpr const char* kWrongKey = "it does not know the job's key, or is of another job";

}  // namespace

void MeetingLinks::open(uint64_t id, const SocketAddress& address, Events events) {
  if (finished_) return events.on_end("this member has ended");
  Link& link = links_[id];
  link.events = std::move(events);
  Hello hello;  // to whoever listens there
  hello.nonce = meetingNonce(key_.job);
  hello.from = selfIncarnation();
  hello.rank = 0;
  link.dial = std::make_unique<Dial>(
      loop_, address, hello, Welcome{}, Deadline::after(kAnswerWithin), kAnswerWithin,
      [this, id](Dial::Result result) { onDialled(id, std::move(result)); });
}

void MeetingLinks::onDialled(uint64_t id, Dial::Result result) {
  Link& link = links_.at(id);
  const auto dial = std::move(link.dial);
  if (result.end != Dial::End::kWelcomed) {
    return end(id, result.detail.empty() ? "nobody listens there" : result.detail);
  }
  FramedSocket::Handlers handlers;
  handlers.on_frame = [this, id](const FrameHeader& header, const std::string& payload) {
    onFrame(id, header, payload);
  };
  handlers.on_end = [this, id](const std::string& why) {
    const bool proved = links_.at(id).met;
    end(id, proved ? why : kWrongKey);
  };
  link.socket = std::make_unique<FramedSocket>(
      loop_, std::move(result.fd),
      std::vector<FrameType>{FrameType::kAnswer, FrameType::kJobReport}, std::move(handlers),
      kMostUnsent);
}

void MeetingLinks::onFrame(uint64_t id, const FrameHeader& header, const std::string& payload) {
  const Link& link = links_.at(id);
  if (header.type == FrameType::kJobReport) {
    const auto told = link.events.on_report;
    return link.met && told ? told(payload) : end(id, "it answers what nobody has asked");
  }
  if (!link.challenged) return answerChallenge(id, payload);
  if (!link.met) return checkProof(id, payload);
  const auto answer = decodeStoreAnswer(payload);
  if (!answer) return end(id, "it answers in words that make no sense");
  const auto told = link.events.on_answer;
  told(header.seq, *answer);
}

void MeetingLinks::answerChallenge(uint64_t id, const std::string& payload) {
  Link& link = links_.at(id);
  ByteReader reader(payload);
  reader.raw(link.theirs.bytes);
  if (!reader.atEnd()) return end(id, kWrongKey);
  link.challenged = true;
  ByteWriter writer;
  writer.raw(link.own.bytes);
  writer.raw(meetingProof(key_, MeetingSide::kClient, link.theirs, link.own));
  FrameHeader header;
  header.type = FrameType::kCall;
  link.socket->send(header, writer.take());
}

void MeetingLinks::checkProof(uint64_t id, const std::string& payload) {
  Link& link = links_.at(id);
  ByteReader reader(payload);
  Digest256 proof{};
  reader.raw(proof);
  const uint8_t part = reader.u8();
  const uint64_t view = reader.u64();
  const Digest256 expected = meetingProof(key_, MeetingSide::kPlace, link.own, link.theirs);
  if (!reader.atEnd() || part > static_cast<uint8_t>(Standing::Part::kMember) ||
      !equalInConstantTime(proof, expected)) {
    return end(id, kWrongKey);
  }
  link.met = true;
  const auto told = link.events.on_met;
  told({static_cast<Standing::Part>(part), view});
}

void MeetingLinks::call(uint64_t id, uint64_t number, const StoreCall& call) {
  const auto found = links_.find(id);
  if (found == links_.end() || !found->second.met) return;
  FrameHeader header;
  header.type = FrameType::kCall;
  header.seq = number;
  found->second.socket->send(header, encodeStoreCall(call));
}

void MeetingLinks::inquire(uint64_t id) {
  const auto found = links_.find(id);
  if (found == links_.end() || !found->second.met) return;
  FrameHeader header;
  header.type = FrameType::kInquiry;
  found->second.socket->send(header, {});
}

void MeetingLinks::finish() {
  finished_ = true;
  while (!links_.empty()) end(links_.begin()->first, "this member has ended");
}

void MeetingLinks::end(uint64_t id, const std::string& why) {
  const auto node = links_.extract(id);
  if (!node.empty()) node.mapped().events.on_end(why);
}

}  // namespace torchft_ext
