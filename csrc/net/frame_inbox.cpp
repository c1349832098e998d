#include "net/frame_inbox.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace torchft_ext {

FrameInbox::State FrameInbox::readFrom(int fd) {
  if (!header_done_) {
    const State state = readHeader(fd);
    if (state != State::kWhole) return state;
  }
  return fill(fd, payload_.data(), payload_.size(), &payload_have_);
}

FrameInbox::State FrameInbox::readHeader(int fd) {
  const State state = fill(fd, bytes_.data(), bytes_.size(), &header_have_);
  return state == State::kWhole ? judgeHeader() : state;
}

FrameInbox::State FrameInbox::judgeHeader() {
  const auto header = decodeHeader(bytes_, &why_);
  if (!header) {
    const auto version = versionOf(bytes_);
    return version && *version != kWireVersion ? State::kWrongVersion : State::kBad;
  }
  if (std::find(expected_.begin(), expected_.end(), header->type) == expected_.end()) {
    why_ = "unexpected frame type " + std::to_string(static_cast<int>(header->type));
    return State::kBad;
  }
  if (header->length > longestPayload(header->type)) {
    why_ = "frame of " + std::to_string(header->length) + " bytes, at most " +
           std::to_string(longestPayload(header->type)) + " are allowed";
    return State::kBad;
  }
  header_ = *header;
  header_done_ = true;
  payload_.resize(header_.length);
  return State::kWhole;
}

FrameInbox::State FrameInbox::fill(int fd, void* into, size_t size, size_t* have) {
  while (*have < size) {
    const ssize_t got = ::recv(fd, static_cast<uint8_t*>(into) + *have, size - *have, MSG_DONTWAIT);
    if (got > 0) {
      *have += static_cast<size_t>(got);
    } else if (got == 0) {
      why_ = "the peer closed the connection";
      return State::kClosed;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return State::kMore;
    } else if (errno != EINTR) {
      why_ = std::error_code(errno, std::generic_category()).message();
      return State::kClosed;
    }
  }
  return State::kWhole;
}

bool sendWhole(int fd, std::string_view frame) {
  ssize_t sent = -1;
  do {
    sent = ::send(fd, frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(frame.size());
}

}  // namespace torchft_ext
