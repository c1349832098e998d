// Frames on their way into one socket, in order. Used by stream connections only, on their loop.
//
// User payload is neither copied nor touched after its frame has left the queue or clear() was
// called. Never blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "net/frame.h"

namespace torchft_ext {

struct OutgoingFrame {
  FrameBytes header{};
  const uint8_t* user_payload = nullptr;
  std::string text;  // instead of a user payload
  bool is_text = false;
  size_t length = 0;           // of the payload
  std::function<void()> sent;  // may be null
  size_t done = 0;             // bytes of header and payload that the kernel has

  size_t total() const { return kFrameHeaderBytes + length; }
  const uint8_t* payload() const {
    return is_text ? reinterpret_cast<const uint8_t*>(text.data()) : user_payload;
  }
};

class SendQueue {
 public:
  bool empty() const { return frames_.empty(); }
  size_t size() const { return frames_.size(); }
  void push(OutgoingFrame frame) { frames_.push_back(std::move(frame)); }
  void clear() { frames_.clear(); }

  // Writes what the socket takes, about `at_most` bytes. 0: fine, full included; else the errno
  // that ended it.
  int writeTo(int fd, size_t at_most);
  // The `sent` callbacks of the frames that the kernel has taken since the last call.
  std::vector<std::function<void()>> takeFinished() { return std::exchange(finished_, {}); }
  bool hasFinished() const { return !finished_.empty(); }
  void forgetFinished() { finished_.clear(); }

  bool isInsideUserPayload() const;  // part of a frame with user payload has gone out
  // Goes on with that frame from a copy of its payload. False: it is longer than that.
  bool ownBegunPayload(size_t at_most);
  void dropUserPayloads();

  uint64_t bytesWritten() const { return bytes_written_; }

 private:
  void takeOff(size_t written);

  std::deque<OutgoingFrame> frames_;
  std::vector<std::function<void()>> finished_;
  uint64_t bytes_written_ = 0;
};

}  // namespace torchft_ext
