#include "peers/line.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

namespace torchft_ext {
namespace {

constexpr uint64_t kProcessLeaves = 1;

uint64_t toMicroseconds(Duration duration) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(duration).count());
}

uint64_t longestOnALine(FrameType type) {
  return type == FrameType::kNotice ? longestPayload(type) : Line::kLongestText;
}

// What a peer says is bounded, so that no arithmetic overflows.
Duration limitFromWire(uint64_t microseconds) {
  constexpr uint64_t kDay = 24ULL * 3600 * 1000 * 1000;
  return std::chrono::microseconds(std::min(microseconds, kDay));
}

}  // namespace

Line::Line(EventLoop& loop, UniqueFd fd) : loop_(loop), fd_(std::move(fd)) {
  loop_.watch(fd_.get(), EPOLLIN | EPOLLRDHUP, [this](uint32_t) { onEvent(); });
}

Line::~Line() {
  close();
}

void Line::close() {
  if (!fd_) return;
  loop_.unwatch(fd_.get());
  fd_.reset();
}

void Line::listen(OnNews on_news) {
  on_news_ = std::move(on_news);
}

void Line::onEvent() {
  flush();
  News news;
  readInto(news);
  if (!news.heard && !news.end) return;
  if (news.end) close();
  // A copy: the callback may replace or destroy on_news_ together with this object.
  const OnNews on_news = on_news_;
  if (on_news) on_news(news);
}

// Bytes that came before an error count: the last words of a peer often arrive with its reset. What
// is beyond kMostReadAtOnce waits for the loop's next turn.
void Line::readInto(News& news) {
  std::array<char, 4096> chunk;
  size_t taken = 0;
  while (!news.end && taken < kMostReadAtOnce) {
    // NOLINTNEXTLINE(clang-analyzer-unix.StdCLibraryFunctions): events come of an open line only
    const ssize_t got = ::recv(fd_.get(), chunk.data(), chunk.size(), 0);
    if (got > 0) {
      news.heard = true;
      taken += static_cast<size_t>(got);
      in_.append(chunk.data(), static_cast<size_t>(got));
      parse(news);
      continue;
    }
    const int error = got < 0 ? errno : 0;
    if (error == EINTR) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) return;
    news.end = LineEnd::kBroken;
    news.why = error == 0 ? "closed without a goodbye" : std::generic_category().message(error);
  }
}

void Line::parse(News& news) {
  size_t at = 0;
  while (!news.end && in_.size() - at >= kFrameHeaderBytes) {
    FrameBytes bytes;
    std::copy_n(in_.begin() + static_cast<std::ptrdiff_t>(at), bytes.size(), bytes.begin());
    std::string why;
    const std::optional<FrameHeader> header = decodeHeader(bytes, &why);
    if (!header || header->length > longestOnALine(header->type)) {
      news.end = LineEnd::kBroken;
      news.why = header ? "a frame is too long" : why;
      break;
    }
    if (in_.size() - at < kFrameHeaderBytes + header->length) break;
    onFrame(*header, std::string_view(in_).substr(at + kFrameHeaderBytes, header->length), news);
    at += kFrameHeaderBytes + header->length;
  }
  in_.erase(0, at);
}

void Line::onFrame(const FrameHeader& header, std::string_view payload, News& news) {
  switch (header.type) {
    case FrameType::kBeat:
      news.beat = true;
      peer_limit_ = limitFromWire(header.tag);
      return;
    case FrameType::kGoodbye:
      news.end = header.aux == kProcessLeaves ? LineEnd::kLeft : LineEnd::kIdle;
      return;
    case FrameType::kFailed:
      news.end = LineEnd::kAccused;
      news.why = std::string(payload);
      return;
    case FrameType::kNotice:
      if (std::optional<Notice> notice = decodeNotice(payload)) {
        news.notices.push_back(std::move(*notice));
        return;
      }
      news.end = LineEnd::kBroken;
      news.why = "a malformed notice";
      return;
    default:
      news.end = LineEnd::kBroken;
      news.why = "a frame that has no place on a liveness line";
  }
}

void Line::send(const FrameHeader& header, std::string_view payload) {
  if (!fd_) return;
  const FrameBytes bytes = encodeHeader(header);
  out_.append(bytes.begin(), bytes.end());
  out_.append(payload);
  flush();
  if (!out_.empty()) loop_.modify(fd_.get(), EPOLLIN | EPOLLRDHUP | EPOLLOUT);
}

// An error is not judged here: reading finds it too, after whatever the peer said last.
void Line::flush() {
  if (out_.empty() || !fd_) return;
  const ssize_t sent = ::send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
  if (sent > 0) {
    out_.erase(0, static_cast<size_t>(sent));
  } else if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    out_.clear();
  }
  if (out_.empty()) loop_.modify(fd_.get(), EPOLLIN | EPOLLRDHUP);
}

void Line::beat(Duration own_limit) {
  if (!out_.empty()) return;
  FrameHeader header;
  header.type = FrameType::kBeat;
  header.tag = toMicroseconds(own_limit);
  send(header, {});
}

bool Line::tell(const Notice& notice) {
  if (!fd_ || out_.size() > kMostUnsent) return false;
  const std::string payload = encodeNotice(notice);
  FrameHeader header;
  header.type = FrameType::kNotice;
  header.length = payload.size();
  send(header, payload);
  return true;
}

void Line::sayNotNeeded() {
  FrameHeader header;
  header.type = FrameType::kGoodbye;
  send(header, {});
}

void Line::sayGoodbye(bool process_leaves) {
  FrameHeader header;
  header.type = FrameType::kGoodbye;
  header.aux = process_leaves ? kProcessLeaves : 0;
  send(header, {});
  close();
}

void Line::sayDeclaredDead(const std::string& why) {
  const std::string text = why.substr(0, kLongestText);
  FrameHeader header;
  header.type = FrameType::kFailed;
  header.length = text.size();
  send(header, text);
  close();
}

void Line::cutForTest() {
  if (fd_) ::shutdown(fd_.get(), SHUT_RDWR);
}

}  // namespace torchft_ext
