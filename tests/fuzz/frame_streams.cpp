// What cuts a byte stream into frames: the handshake's inbox, a liveness line, a link.
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "host/link.h"
#include "paired_sockets.h"
#include "peers/line.h"
#include "streams.h"

namespace torchft_ext::fuzz {
namespace {

// ---------------------------------------------------------------- liveness line

struct OnALine {
  bool beat = false;
  Duration limit{0};
  std::vector<std::string> notices;  // encoded
  std::optional<LineEnd> end;
};

void judgeLineFrame(const FrameHeader& header, std::string_view payload, OnALine& said) {
  constexpr uint64_t kDay = 24ULL * 3600 * 1000 * 1000;
  switch (header.type) {
    case FrameType::kBeat:
      said.beat = true;
      said.limit = std::chrono::microseconds(std::min(header.tag, kDay));
      return;
    case FrameType::kGoodbye:
      said.end = header.aux == 1 ? LineEnd::kLeft : LineEnd::kIdle;
      return;
    case FrameType::kFailed:
      said.end = LineEnd::kAccused;
      return;
    case FrameType::kNotice:
      if (!decodeNotice(payload)) break;
      said.notices.emplace_back(payload);
      return;
    default:
      break;
  }
  said.end = LineEnd::kBroken;
}

OnALine judgeLine(std::string_view sent, bool hung_up) {
  OnALine said;
  while (!said.end && sent.size() >= kFrameHeaderBytes) {
    const auto header = headerAt(sent);
    const size_t longest = header && header->type == FrameType::kNotice ? 1024 : 512;
    if (!header || header->length > longest) {
      said.end = LineEnd::kBroken;
      break;
    }
    const size_t whole = kFrameHeaderBytes + header->length;
    if (sent.size() < whole) break;
    judgeLineFrame(*header, sent.substr(kFrameHeaderBytes, header->length), said);
    sent.remove_prefix(whole);
  }
  if (hung_up && !said.end) said.end = LineEnd::kBroken;
  return said;
}

class LineReader : public Reader {
 public:
  explicit LineReader(bool destroys) : destroys_(destroys) {}

  UniqueFd begin() override {
    Pair pair;
    line_ = std::make_unique<Line>(loop(), std::move(pair.near));
    line_->listen([this](const Line::News& news) { onNews(news); });
    return std::move(pair.far);
  }

  bool check(int /*far*/, std::string_view sent, bool hung_up) override {
    const OnALine expected = judgeLine(sent, hung_up);
    require(heard_.beat == expected.beat);
    require(heard_.notices == expected.notices);
    require(heard_.end == expected.end);
    require(!line_ || line_->peerLimit() == expected.limit);
    return !heard_.end;
  }

  void end() override { line_.reset(); }

 private:
  void onNews(const Line::News& news) {
    require(!heard_.end && (news.heard || news.end));
    heard_.beat = heard_.beat || news.beat;
    for (const Notice& notice : news.notices) heard_.notices.push_back(encodeNotice(notice));
    heard_.end = news.end;
    if (news.end && destroys_) line_.reset();
  }

  const bool destroys_;
  std::unique_ptr<Line> line_;
  OnALine heard_;
};

// ---------------------------------------------------------------- link

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

struct OnALink {
  std::vector<std::string> frames;  // whole
  std::optional<bool> broken;       // whether cleanly
};

OnALink judgeLink(std::string_view sent, bool hung_up, size_t close_after) {
  OnALink said;
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

// Makes the link wait at every frame with an odd aux.
class LinkReader : public Reader, LinkReceiver {
 public:
  LinkReader(bool destroys, size_t close_after) : destroys_(destroys), close_after_(close_after) {}

  UniqueFd begin() override {
    Pair pair;
    traffic_ = std::make_shared<Traffic>();
    link_ = makeStreamLink(loop(), std::move(pair.near), traffic_, Duration(0));
    link_->setReceiver(this);
    return std::move(pair.far);
  }

  bool restless() override {
    if (closed_ || said_.broken) return turns_to_close_ > 0 && turns_to_close_-- > 0;
    if (!std::exchange(waiting_, false)) return false;
    link_->resume();
    return true;
  }

  bool check(int /*far*/, std::string_view sent, bool hung_up) override {
    const OnALink expected = judgeLink(sent, hung_up, close_after_);
    require(said_.frames == expected.frames);
    require(said_.broken == expected.broken);
    const bool open = !closed_ && !said_.broken;
    require(!open || traffic_->received == sent.size());
    return open;
  }

  void end() override { link_.reset(); }

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
    if (destroys_) link_.reset();
  }

  void keep(const FrameHeader& header, std::string_view payload) {
    requireOpen();
    const FrameBytes bytes = encodeHeader(header);
    said_.frames.emplace_back(bytes.begin(), bytes.end());
    said_.frames.back() += payload;
    if (said_.frames.size() != close_after_) return;
    closed_ = true;
    destroys_ ? link_.reset() : link_->close();
  }
  void requireOpen() const { require(!closed_ && !waiting_ && !said_.broken); }

  const bool destroys_;
  const size_t close_after_;
  std::shared_ptr<Traffic> traffic_;
  std::shared_ptr<Link> link_;
  OnALink said_;
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
  InboxVerdict verdict;
  const auto check = [&](bool hung_up) {
    const auto state = inbox.readFrom(pair.near.get());
    if (verdict.state == FrameInbox::State::kMore) verdict = judgeInbox(sent, hung_up, expected);
    require(state == verdict.state);
    require(inbox.payload().size() <= 512);
    if (state != FrameInbox::State::kWhole) return;
    require(encodeHeader(inbox.header()) == encodeHeader(verdict.header));
    require(inbox.payload() == verdict.payload);
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
  require(readAll(pair.near.get()) == sent.substr(verdict.taken));
}

void line(std::string_view bytes) {
  const CutStream stream(bytes);
  LineReader reader(stream.has(CutStream::kDestroys));
  feed(stream, reader);
}

void link(std::string_view bytes) {
  CutStream stream(bytes);
  // What waits when the peer hangs up is lost, whether or not it came together with the end.
  stream.flags &= static_cast<uint8_t>(~CutStream::kHangsUpAtOnce);
  LinkReader reader(stream.has(CutStream::kDestroys), stream.flags >> CutStream::kCloseShift);
  feed(stream, reader);
}

}  // namespace torchft_ext::fuzz
