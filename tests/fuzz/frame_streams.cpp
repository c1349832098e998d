// What cuts a byte stream into frames: the handshake's inbox, a liveness connection, a connection.
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "host/connection.h"
#include "liveness/liveness_connection.h"
#include "paired_sockets.h"
#include "streams.h"

namespace torchft_ext::fuzz {
namespace {

// ---------------------------------------------------------------- liveness connection

struct OnALine {
  bool beat = false;
  Duration limit{0};
  std::vector<std::string> notices;  // encoded
  std::optional<LivenessEnd> end;
};

void judgeConnectionFrame(const FrameHeader& header, std::string_view payload, OnALine& said) {
  constexpr uint64_t kDay = 24ULL * 3600 * 1000 * 1000;
  switch (header.type) {
    case FrameType::kBeat:
      said.beat = true;
      said.limit = std::chrono::microseconds(std::min(header.tag, kDay));
      return;
    case FrameType::kGoodbye:
      said.end = header.aux == 1 ? LivenessEnd::kLeft : LivenessEnd::kIdle;
      return;
    case FrameType::kFailed:
      said.end = LivenessEnd::kAccused;
      return;
    case FrameType::kNotice:
      if (!decodeNotice(payload)) break;
      said.notices.emplace_back(payload);
      return;
    default:
      break;
  }
  said.end = LivenessEnd::kBroken;
}

OnALine judgeConnection(std::string_view sent, bool hung_up) {
  OnALine said;
  while (!said.end && sent.size() >= kFrameHeaderBytes) {
    const auto header = headerAt(sent);
    const size_t longest = header && header->type == FrameType::kNotice ? 1024 : 512;
    if (!header || header->length > longest) {
      said.end = LivenessEnd::kBroken;
      break;
    }
    const size_t whole = kFrameHeaderBytes + header->length;
    if (sent.size() < whole) break;
    judgeConnectionFrame(*header, sent.substr(kFrameHeaderBytes, header->length), said);
    sent.remove_prefix(whole);
  }
  if (hung_up && !said.end) said.end = LivenessEnd::kBroken;
  return said;
}

class LineReader : public Reader {
 public:
  explicit LineReader(bool destroys) : destroys_(destroys) {}

  UniqueFd begin() override {
    Pair pair;
    connection_ = std::make_unique<LivenessConnection>(loop(), std::move(pair.near));
    connection_->listen([this](const LivenessConnection::Updates& updates) { onUpdates(updates); });
    return std::move(pair.far);
  }

  bool check(int /*far*/, std::string_view sent, bool hung_up) override {
    const OnALine expected = judgeConnection(sent, hung_up);
    require(heard_.beat == expected.beat);
    require(heard_.notices == expected.notices);
    require(heard_.end == expected.end);
    require(!connection_ || connection_->peerLimit() == expected.limit);
    return !heard_.end;
  }

  void end() override { connection_.reset(); }

 private:
  void onUpdates(const LivenessConnection::Updates& updates) {
    require(!heard_.end && (updates.heard || updates.end));
    heard_.beat = heard_.beat || updates.beat;
    for (const Notice& notice : updates.notices) heard_.notices.push_back(encodeNotice(notice));
    heard_.end = updates.end;
    if (updates.end && destroys_) connection_.reset();
  }

  const bool destroys_;
  std::unique_ptr<LivenessConnection> connection_;
  OnALine heard_;
};

// ---------------------------------------------------------------- connection

constexpr size_t kLongestInto = 8192;

Receipt::Kind kindFor(const FrameHeader& header) {
  switch (header.type) {
    case FrameType::kData:
    case FrameType::kMessage:
      return header.length <= kLongestInto ? Receipt::Kind::kInto : Receipt::Kind::kBreak;
    case FrameType::kHello:
    case FrameType::kWelcome:
    case FrameType::kRefused:
      return Receipt::Kind::kBreak;
    default:
      return Receipt::Kind::kText;
  }
}

struct OnAConnection {
  std::vector<std::string> frames;  // whole
  std::optional<bool> broken;       // whether cleanly
};

OnAConnection judgeConnection(std::string_view sent, bool hung_up, size_t close_after) {
  OnAConnection said;
  while (close_after == 0 || said.frames.size() < close_after) {
    if (sent.size() < kFrameHeaderBytes) {
      if (hung_up) said.broken = sent.empty();
      break;
    }
    const auto header = headerAt(sent);
    const auto kind = header ? kindFor(*header) : Receipt::Kind::kBreak;
    if (kind == Receipt::Kind::kBreak ||
        (kind == Receipt::Kind::kText && header->length > longestPayload(header->type))) {
      said.broken = false;
      break;
    }
    const size_t whole = kFrameHeaderBytes + header->length;
    if (sent.size() < whole) {
      if (hung_up) said.broken = false;
      break;
    }
    said.frames.emplace_back(sent.substr(0, whole));
    sent.remove_prefix(whole);
  }
  return said;
}

// Makes the connection wait at every frame with an odd aux.
class ConnectionReader : public Reader, ConnectionReceiver {
 public:
  ConnectionReader(bool destroys, size_t close_after)
      : destroys_(destroys), close_after_(close_after) {}

  UniqueFd begin() override {
    Pair pair;
    traffic_ = std::make_shared<Traffic>();
    connection_ = makeStreamConnection(loop(), std::move(pair.near), traffic_, Duration(0));
    connection_->setReceiver(this);
    return std::move(pair.far);
  }

  bool restless() override {
    if (closed_ || said_.broken) return turns_to_close_ > 0 && turns_to_close_-- > 0;
    if (!std::exchange(waiting_, false)) return false;
    connection_->resume();
    return true;
  }

  bool check(int /*far*/, std::string_view sent, bool hung_up) override {
    const OnAConnection expected = judgeConnection(sent, hung_up, close_after_);
    require(said_.frames == expected.frames);
    require(said_.broken == expected.broken);
    const bool open = !closed_ && !said_.broken;
    require(!open || traffic_->received == sent.size());
    return open;
  }

  void end() override { connection_.reset(); }

 private:
  Receipt onHeader(const FrameHeader& header) override {
    requireOpen();
    Receipt receipt;
    if (offered_) {
      require(encodeHeader(header) == encodeHeader(*offered_));
      offered_.reset();
    } else if ((header.aux & 1) != 0) {
      offered_ = header;
      waiting_ = true;
      receipt.kind = Receipt::Kind::kWait;
      return receipt;
    }
    receipt.kind = kindFor(header);
    receipt.why = "not expected";
    if (receipt.kind != Receipt::Kind::kInto) return receipt;
    into_ = std::make_unique<uint8_t[]>(header.length);  // a byte too many is found
    receipt.into = into_.get();
    return receipt;
  }
  void onFrame(const FrameHeader& header) override {
    const std::unique_ptr<uint8_t[]> into = std::move(into_);
    keep(header, {reinterpret_cast<const char*>(into.get()), header.length});
  }
  void onText(const FrameHeader& header, std::string payload) override {
    require(payload.size() <= longestPayload(header.type));
    keep(header, payload);
  }
  void onBroken(const std::string& why, bool clean) override {
    requireOpen();
    require(!why.empty());
    said_.broken = clean;
    if (destroys_) connection_.reset();
  }

  void keep(const FrameHeader& header, std::string_view payload) {
    requireOpen();
    const FrameBytes bytes = encodeHeader(header);
    said_.frames.emplace_back(bytes.begin(), bytes.end());
    said_.frames.back() += payload;
    if (said_.frames.size() != close_after_) return;
    closed_ = true;
    destroys_ ? connection_.reset() : connection_->close();
  }
  void requireOpen() const { require(!closed_ && !waiting_ && !said_.broken); }

  const bool destroys_;
  const size_t close_after_;
  std::shared_ptr<Traffic> traffic_;
  std::shared_ptr<Connection> connection_;
  OnAConnection said_;
  bool closed_ = false;
  bool waiting_ = false;
  int turns_to_close_ = 2;  // the descriptor, by a timer that is due at once
  std::optional<FrameHeader> offered_;
  std::unique_ptr<uint8_t[]> into_;
};

}  // namespace

// Needs no loop. An inbox that has come to an end is asked again, as its owner never does.
void inbox(std::string_view bytes) {
  const CutStream stream(bytes);
  const std::vector<FrameType> expected =
      stream.has(CutStream::kDestroys)  // there is nothing to destroy it
          ? std::vector{FrameType::kHello}
          : std::vector{FrameType::kWelcome, FrameType::kRefused};
  Pair pair;
  FrameInbox inbox(expected);
  std::string sent;
  InboxOutcome outcome;
  const auto check = [&](bool hung_up) {
    const auto state = inbox.readFrom(pair.near.get());
    if (outcome.state == FrameInbox::State::kMore) outcome = judgeInbox(sent, hung_up, expected);
    require(state == outcome.state);
    require(inbox.payload().size() <= 512);
    if (state != FrameInbox::State::kWhole) return;
    require(encodeHeader(inbox.header()) == encodeHeader(outcome.header));
    require(inbox.payload() == outcome.payload);
  };
  check(false);
  for (const std::string& piece : stream.pieces) {
    require(wasSent(pair.far.get(), piece));
    sent += piece;
    check(false);
  }
  if (stream.has(CutStream::kHangsUp)) {
    pair.far.reset();
    check(true);
  }
  require(readAll(pair.near.get()) == sent.substr(outcome.taken));
}

void livenessConnection(std::string_view bytes) {
  const CutStream stream(bytes);
  LineReader reader(stream.has(CutStream::kDestroys));
  feed(stream, reader);
}

void connection(std::string_view bytes) {
  CutStream stream(bytes);
  // What waits when the peer hangs up is lost, whether or not it came together with the end.
  stream.flags &= static_cast<uint8_t>(~CutStream::kHangsUpAtOnce);
  ConnectionReader reader(stream.has(CutStream::kDestroys), stream.flags >> CutStream::kCloseShift);
  feed(stream, reader);
}

}  // namespace torchft_ext::fuzz
