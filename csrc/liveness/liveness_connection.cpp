#include "liveness/liveness_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/text.h"

namespace torchft_ext {
namespace {

constexpr uint64_t kProcessLeaves = 1;

uint64_t toMicroseconds(Duration duration) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(duration).count());
}

uint64_t longestOnALine(FrameType type) {
  return type == FrameType::kNotice ? longestPayload(type) : LivenessConnection::kLongestText;
}

// What a peer says is bounded, so that no arithmetic overflows.
Duration limitFromWire(uint64_t microseconds) {
  constexpr uint64_t kDay = 24ULL * 3600 * 1000 * 1000;
  return std::chrono::microseconds(std::min(microseconds, kDay));
}

}  // namespace

LivenessConnection::LivenessConnection(EventLoop& loop, UniqueFd fd)
    : loop_(loop), fd_(std::move(fd)) {
  loop_.watch(fd_.get(), EPOLLIN | EPOLLRDHUP, [this](uint32_t) { onEvent(); });
}

LivenessConnection::~LivenessConnection() {
  close();
}

void LivenessConnection::close() {
  if (!fd_) return;
  loop_.unwatch(fd_.get());
  fd_.reset();
}

void LivenessConnection::listen(OnUpdates on_updates) {
  on_updates_ = std::move(on_updates);
}

void LivenessConnection::onEvent() {
  flush();
  Updates updates;
  readInto(updates);
  if (!updates.heard && !updates.end) return;
  if (updates.end) close();
  // A copy: the callback may replace or destroy on_updates_ together with this object.
  const OnUpdates on_updates = on_updates_;
  if (on_updates) on_updates(updates);
}

// Bytes that came before an error count: the final frames of a peer often arrive with its reset.
// What is beyond kMostReadAtOnce waits for the loop's next turn.
void LivenessConnection::readInto(Updates& updates) {
  std::array<char, 4096> chunk;
  size_t taken = 0;
  while (!updates.end && taken < kMostReadAtOnce) {
    // Events come of an open connection only.
    // NOLINTNEXTLINE(clang-analyzer-unix.StdCLibraryFunctions)
    const ssize_t got = ::recv(fd_.get(), chunk.data(), chunk.size(), 0);
    if (got > 0) {
      updates.heard = true;
      taken += static_cast<size_t>(got);
      in_.append(chunk.data(), static_cast<size_t>(got));
      parse(updates);
      continue;
    }
    const int error = got < 0 ? errno : 0;
    if (error == EINTR) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) return;
    updates.end = LivenessEnd::kBroken;
    updates.why = error == 0 ? "closed without a goodbye" : std::generic_category().message(error);
  }
}

void LivenessConnection::parse(Updates& updates) {
  size_t at = 0;
  while (!updates.end && in_.size() - at >= kFrameHeaderBytes) {
    FrameBytes bytes;
    std::copy_n(in_.begin() + static_cast<std::ptrdiff_t>(at), bytes.size(), bytes.begin());
    std::string why;
    const std::optional<FrameHeader> header = decodeHeader(bytes, &why);
    if (!header || header->length > longestOnALine(header->type)) {
      updates.end = LivenessEnd::kBroken;
      updates.why = header ? "a frame is too long" : why;
      break;
    }
    if (in_.size() - at < kFrameHeaderBytes + header->length) break;
    onFrame(*header, std::string_view(in_).substr(at + kFrameHeaderBytes, header->length), updates);
    at += kFrameHeaderBytes + header->length;
  }
  in_.erase(0, at);
}

void LivenessConnection::onFrame(const FrameHeader& header, std::string_view payload,
                                 Updates& updates) {
  switch (header.type) {
    case FrameType::kBeat:
      updates.beat = true;
      peer_limit_ = limitFromWire(header.tag);
      return;
    case FrameType::kGoodbye:
      updates.end = header.aux == kProcessLeaves ? LivenessEnd::kLeft : LivenessEnd::kIdle;
      return;
    case FrameType::kFailed:
      updates.end = LivenessEnd::kAccused;
      updates.why = std::string(payload);
      return;
    case FrameType::kNotice:
      if (std::optional<Notice> notice = decodeNotice(payload)) {
        updates.notices.push_back(std::move(*notice));
        return;
      }
      updates.end = LivenessEnd::kBroken;
      updates.why = "a malformed notice";
      return;
    default:
      updates.end = LivenessEnd::kBroken;
      updates.why = "a frame that has no place on a liveness connection";
  }
}

void LivenessConnection::send(const FrameHeader& header, std::string_view payload) {
  if (!fd_) return;
  const FrameBytes bytes = encodeHeader(header);
  out_.append(bytes.begin(), bytes.end());
  out_.append(payload);
  flush();
  if (!out_.empty()) loop_.modify(fd_.get(), EPOLLIN | EPOLLRDHUP | EPOLLOUT);
}

// An error is not judged here: reading finds it too, after whatever the peer said last.
void LivenessConnection::flush() {
  if (out_.empty() || !fd_) return;
  const ssize_t sent = ::send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
  if (sent > 0) {
    out_.erase(0, static_cast<size_t>(sent));
  } else if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    out_.clear();
  }
  if (out_.empty()) loop_.modify(fd_.get(), EPOLLIN | EPOLLRDHUP);
}

void LivenessConnection::beat(Duration own_limit) {
  if (!out_.empty()) return;
  FrameHeader header;
  header.type = FrameType::kBeat;
  header.tag = toMicroseconds(own_limit);
  send(header, {});
}

bool LivenessConnection::tell(const Notice& notice) {
  if (!fd_ || out_.size() > kMostUnsent) return false;
  const std::string payload = encodeNotice(notice);
  FrameHeader header;
  header.type = FrameType::kNotice;
  header.length = payload.size();
  send(header, payload);
  return true;
}

void LivenessConnection::sayNotNeeded() {
  FrameHeader header;
  header.type = FrameType::kGoodbye;
  send(header, {});
}

void LivenessConnection::sayGoodbye(bool process_leaves) {
  FrameHeader header;
  header.type = FrameType::kGoodbye;
  header.aux = process_leaves ? kProcessLeaves : 0;
  send(header, {});
  close();
}

void LivenessConnection::sayDeclaredDead(const std::string& why) {
  const std::string text = cutText(why, kLongestText);
  FrameHeader header;
  header.type = FrameType::kFailed;
  header.length = text.size();
  send(header, text);
  close();
}

void LivenessConnection::cutForTest() {
  if (fd_) ::shutdown(fd_.get(), SHUT_RDWR);
}

}  // namespace torchft_ext
