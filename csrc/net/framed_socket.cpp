#include "net/framed_socket.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

namespace torchft_ext {

FramedSocket::FramedSocket(EventLoop& loop, UniqueFd fd, std::vector<FrameType> expected,
                           Handlers handlers, size_t most_unsent)
    : loop_(loop),
      fd_(std::move(fd)),
      expected_(std::move(expected)),
      handlers_(std::make_shared<const Handlers>(std::move(handlers))),
      most_unsent_(most_unsent) {
  loop_.watch(fd_.get(), EPOLLIN | EPOLLRDHUP, [this](uint32_t) { onEvent(); });
}

FramedSocket::~FramedSocket() {
  *alive_ = false;
  close();
}

void FramedSocket::close() {
  if (!fd_) return;
  loop_.unwatch(fd_.get());
  fd_.reset();
}

// Frames that came before the end count. A handler may destroy this object.
void FramedSocket::onEvent() {
  write();
  std::string why = readSome();
  std::string nonsense;
  auto frames = takeFrames(&nonsense);
  if (!nonsense.empty()) why = nonsense;
  if (!broken_.empty()) why = broken_;  // it is what ended it
  if (!why.empty()) close();
  const std::shared_ptr<const Handlers> handlers = handlers_;
  const std::shared_ptr<bool> alive = alive_;
  for (auto& [header, payload] : frames) {
    handlers->on_frame(header, std::move(payload));
    if (!*alive) return;
  }
  if (!why.empty()) handlers->on_end(why);
}

std::string FramedSocket::readSome() {
  std::array<char, 16384> chunk;
  size_t taken = 0;
  while (taken < kMostReadAtOnce) {
    const ssize_t got = ::recv(fd_.get(), chunk.data(), chunk.size(), 0);
    if (got > 0) {
      taken += static_cast<size_t>(got);
      in_.append(chunk.data(), static_cast<size_t>(got));
      // It was all: what comes after it, an end too, is another event.
      if (static_cast<size_t>(got) < chunk.size()) break;
      continue;
    }
    const int error = got < 0 ? errno : 0;
    if (error == EINTR) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) break;
    return error == 0 ? "closed by the peer" : std::generic_category().message(error);
  }
  return {};
}

bool FramedSocket::isExpected(FrameType type) const {
  return std::find(expected_.begin(), expected_.end(), type) != expected_.end();
}

std::vector<std::pair<FrameHeader, std::string>> FramedSocket::takeFrames(std::string* why) {
  std::vector<std::pair<FrameHeader, std::string>> frames;
  size_t at = 0;
  while (in_.size() - at >= kFrameHeaderBytes) {
    FrameBytes bytes;
    std::copy_n(in_.begin() + static_cast<std::ptrdiff_t>(at), bytes.size(), bytes.begin());
    const std::optional<FrameHeader> header = decodeHeader(bytes, why);
    if (!header) break;
    if (!isExpected(header->type) || header->length > longestPayload(header->type)) {
      *why = "a frame that has no place here";
      break;
    }
    if (in_.size() - at < kFrameHeaderBytes + header->length) break;
    frames.emplace_back(*header, in_.substr(at + kFrameHeaderBytes, header->length));
    at += kFrameHeaderBytes + header->length;
  }
  in_.erase(0, at);
  return frames;
}

void FramedSocket::send(FrameHeader header, std::string_view payload) {
  add(header, payload);
  flush();
}

void FramedSocket::add(FrameHeader header, std::string_view payload) {
  if (!fd_ || finishing_ || !broken_.empty()) return;
  header.length = payload.size();
  const FrameBytes bytes = encodeHeader(header);
  out_.append(bytes.begin(), bytes.end());
  out_.append(payload);
}

void FramedSocket::flush() {
  write();
  if (fd_ && broken_.empty() && out_.size() - sent_ > most_unsent_) {
    broken_ = "the peer takes nothing";
    ::shutdown(fd_.get(), SHUT_RDWR);  // the handler tells it
  }
}

void FramedSocket::finishSending() {
  finishing_ = true;
  write();
}

// An error is told by reading, after whatever the peer said last.
void FramedSocket::write() {
  if (!fd_ || !broken_.empty()) return;
  while (sent_ < out_.size()) {
    const ssize_t sent = ::send(fd_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (sent > 0) {
      sent_ += static_cast<size_t>(sent);
      continue;
    }
    const int error = sent < 0 ? errno : EPIPE;
    if (error == EINTR) continue;
    if (error != EAGAIN && error != EWOULDBLOCK) {
      broken_ = std::generic_category().message(error);
      sent_ = out_.size();
      ::shutdown(fd_.get(), SHUT_RDWR);
    }
    break;
  }
  const bool all = sent_ == out_.size();
  if (all) {
    out_.clear();
    sent_ = 0;
    if (finishing_) ::shutdown(fd_.get(), SHUT_WR);
  }
  awaitRoom(!all);
}

// A system call, so only where it changes something.
void FramedSocket::awaitRoom(bool wanted) {
  if (std::exchange(awaits_room_, wanted) == wanted) return;
  loop_.modify(fd_.get(), wanted ? EPOLLIN | EPOLLRDHUP | EPOLLOUT : EPOLLIN | EPOLLRDHUP);
}

}  // namespace torchft_ext
