#include "host/send_queue.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace torchft_ext {
namespace {

// What one call hands to the kernel.
class Pieces {
 public:
  explicit Pieces(size_t at_most) : at_most_(at_most) {}
  bool full() const { return count_ + 2 > list_.size() || bytes_ >= at_most_; }
  size_t bytes() const { return bytes_; }

  void addRest(const OutgoingFrame& frame) {
    const size_t of_header = std::min(frame.done, kFrameHeaderBytes);
    add(frame.header.data() + of_header, kFrameHeaderBytes - of_header);
    const size_t of_payload = frame.done - of_header;
    const size_t room = at_most_ - std::min(at_most_, bytes_);
    add(frame.payload() + of_payload, std::min(frame.length - of_payload, room));
  }

  msghdr message() {
    msghdr header{};
    header.msg_iov = list_.data();
    header.msg_iovlen = count_;
    return header;
  }

 private:
  void add(const uint8_t* data, size_t bytes) {
    if (bytes == 0) return;
    // iovec has no const, although sendmsg only reads.
    list_[count_++] = {const_cast<uint8_t*>(data), bytes};
    bytes_ += bytes;
  }

  const size_t at_most_;
  std::array<iovec, 16> list_;
  size_t count_ = 0;
  size_t bytes_ = 0;
};

}  // namespace

int SendQueue::writeTo(int fd, size_t at_most) {
  for (size_t budget = at_most; !frames_.empty();) {
    Pieces pieces(budget);
    for (size_t i = 0; i < frames_.size() && !pieces.full(); ++i) {
      pieces.addRest(frames_[i]);
      if (frames_[i].done + pieces.bytes() < frames_[i].total()) break;  // cut by the budget
    }
    const msghdr message = pieces.message();
    const ssize_t count = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) {
      const bool later = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      return later ? 0 : errno;
    }
    const auto written = static_cast<size_t>(count);
    takeOff(written);
    if (written < pieces.bytes() || written >= budget) return 0;
    budget -= written;
  }
  return 0;
}

void SendQueue::takeOff(size_t written) {
  bytes_written_ += written;
  while (written > 0) {
    OutgoingFrame& front = frames_.front();
    const size_t part = std::min(written, front.total() - front.done);
    front.done += part;
    written -= part;
    if (front.done < front.total()) return;
    if (front.sent) finished_.push_back(std::move(front.sent));
    frames_.pop_front();
  }
}

bool SendQueue::isInsideUserPayload() const {
  return !frames_.empty() && !frames_.front().is_text && frames_.front().done > 0;
}

bool SendQueue::ownBegunPayload(size_t at_most) {
  if (!isInsideUserPayload()) return true;
  OutgoingFrame& front = frames_.front();
  if (front.length > at_most) return false;
  front.text.assign(reinterpret_cast<const char*>(front.user_payload), front.length);
  front.is_text = true;
  front.sent = nullptr;
  return true;
}

void SendQueue::dropUserPayloads() {
  std::erase_if(frames_, [](const OutgoingFrame& frame) { return !frame.is_text; });
}

}  // namespace torchft_ext
