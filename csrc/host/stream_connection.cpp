#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "host/connection.h"
#include "host/send_queue.h"
#include "net/socket_address.h"

namespace torchft_ext {
namespace {

constexpr size_t kBytesPerTurn = size_t{1} << 20;  // then the other connections have their turn
constexpr size_t kInboxBytes = 4096;
constexpr size_t kLongestCopy = size_t{1} << 20;

std::string textOf(int error) {
  return std::error_code(error, std::generic_category()).message();
}

// Nothing for now.
bool wouldBlock(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

// The loop's handlers share it, so that a receiver may close or release the connection from within
// a call.
class StreamConnection final : public Connection,
                               public std::enable_shared_from_this<StreamConnection> {
 public:
  StreamConnection(EventLoop& loop, UniqueFd fd, std::shared_ptr<Traffic> traffic,
                   Duration closed_after)
      : loop_(loop),
        fd_(std::move(fd)),
        traffic_(std::move(traffic)),
        closed_after_(closed_after) {}

  void setReceiver(ConnectionReceiver* receiver) override {
    if (stopped()) return;
    receiver_ = receiver;
    updateInterest();
  }

  void send(const FrameHeader& header, const uint8_t* payload,
            std::function<void()> sent) override {
    OutgoingFrame frame;
    frame.header = encodeHeader(header);
    frame.user_payload = payload;
    frame.length = header.length;
    frame.sent = std::move(sent);
    enqueue(std::move(frame));
  }

  void sendText(const FrameHeader& header, std::string payload) override {
    assert(header.length == payload.size());
    OutgoingFrame frame;
    frame.header = encodeHeader(header);
    frame.is_text = true;
    frame.length = payload.size();
    frame.text = std::move(payload);
    enqueue(std::move(frame));
  }

  void resume() override {
    if (!paused_ || ended_) return;
    paused_ = false;
    muted_ = false;
    hung_up_ = false;
    read_wanted_ = true;
    updateInterest();
    callBackLater();
  }

  void close() override {
    if (ended_) return;
    ended_ = true;
    receiver_ = nullptr;
    if (loop_.inLoop()) {  // elsewhere only when the loop has ended, with all it watched
      if (watched_) loop_.unwatch(fd_.get());
      if (linger_timer_ != 0) loop_.cancel(linger_timer_);
      if (!lingering_) closeDescriptorLater();
    }
    fd_.reset();
    queue_.clear();
    queue_.forgetFinished();
  }

  void detachBuffers() override {
    if (stopped()) return;
    stopCallbacks();
    updateInterest();
  }

  void closeAfterTexts(Duration at_most) override {
    if (ended_ || lingering_) return;
    if (!detached_) stopCallbacks();
    if (ended_) return;
    lingering_ = true;
    linger_timer_ = loop_.runAt(Clock::now() + at_most, [weak = weak_from_this()] {
      if (auto self = weak.lock()) self->close();
    });
    writeSome();
    // The rest is work of the kernel's, and whoever closes has waiters to release first.
    const bool posted = loop_.post([self = shared_from_this()] { self->linger(); });
    if (!posted) linger();
  }

  bool sendQueueEmpty() const override { return queue_.empty(); }
  bool hasMoreToRead() const override { return more_to_read_ && !paused_ && !stopped(); }
  bool everythingArrived() const override {
    return ended_ || (queue_.empty() && peersKernelHasAll(fd_.get()));
  }

 private:
  bool stopped() const { return ended_ || detached_; }  // no more callbacks

  void enqueue(OutgoingFrame frame) {
    if (ended_ || lingering_ || !send_error_.empty()) return;
    assert(frame.is_text || !detached_);
    queue_.push(std::move(frame));
    if (queue_.size() > 1) return;
    writeSome();
    updateInterest();
    if (queue_.hasFinished() || !send_error_.empty()) callBackLater();
  }

  void stopCallbacks() {
    if (!queue_.ownBegunPayload(kLongestCopy)) return close();
    receiver_ = nullptr;
    queue_.dropUserPayloads();
    queue_.forgetFinished();
    detached_ = true;
  }

  // Or when the loop ends, with what its timers hold.
  void closeDescriptorLater() {
    const auto held = std::make_shared<UniqueFd>(std::move(fd_));
    loop_.runAt(Clock::now() + closed_after_, [held] { held->reset(); });
  }

  // ---------------------------------------------------------------- events

  void onEvents(uint32_t events) {
    if (ended_) return;
    const bool hung_up = (events & (EPOLLHUP | EPOLLERR)) != 0;
    if (hung_up || (events & EPOLLOUT) != 0) writeSome();
    if (lingering_) {
      discardInput();
      linger();
      return;
    }
    runFinished();
    if (detached_) updateInterest();
    if (stopped()) return;
    // A pause is often over before the next event: only then is the kernel told.
    muted_ = paused_;
    if (hung_up || (events & EPOLLIN) != 0) readAndJudge(hung_up);
    updateInterest();
  }

  // What a broken connection still holds is read before its end is told; unless nobody wants it
  // now, or waiting for that would hide a death. A Unix socket that was closed in order hangs up
  // too, and keeps what came before.
  void readAndJudge(bool hung_up) {
    if (receiver_ == nullptr) return;
    const bool drained = paused_ || readSome();
    more_to_read_ = !drained;
    if (stopped()) return;
    if (paused_ && hung_up) {
      const int error = pendingSocketError(fd_.get());
      if (error != 0) return endWith(textOf(error), false);
      hung_up_ = true;
    } else if (!send_error_.empty() && (paused_ || drained)) {
      endWith(send_error_, false);
    }
  }

  // Callbacks never run from inside the caller's own call: they run from here.
  void callBackLater() {
    if (std::exchange(call_back_posted_, true)) return;
    loop_.post([self = shared_from_this()] {
      self->call_back_posted_ = false;
      if (self->stopped()) return;
      self->runFinished();
      if (self->stopped()) return;
      if (!std::exchange(self->read_wanted_, false)) return;
      self->readAndJudge(false);
      self->updateInterest();
    });
  }

  void runFinished() {
    for (auto& sent : queue_.takeFinished()) {
      if (stopped()) return;
      sent();
    }
  }

  void updateInterest() {
    if (ended_) return;
    const bool wants_input = lingering_ || (receiver_ != nullptr && !muted_);
    const uint32_t interest = (wants_input ? EPOLLIN : 0U) | (queue_.empty() ? 0U : EPOLLOUT);
    const bool told_again = hung_up_ && !lingering_;  // without end, and there is nothing to do
    const bool watch = !told_again && (interest != 0 || receiver_ != nullptr);
    if (watch && !watched_) {
      loop_.watch(fd_.get(), interest,
                  [self = shared_from_this()](uint32_t events) { self->onEvents(events); });
    } else if (!watch && watched_) {
      loop_.unwatch(fd_.get());  // a hang-up would be told again and again
    } else if (watch && interest != interest_) {
      loop_.modify(fd_.get(), interest);
    }
    watched_ = watch;
    interest_ = interest;
  }

  void endWith(const std::string& why, bool clean) {
    // What the kernel took before the end counts as sent: an operation may have been waiting for
    // just this.
    runFinished();
    if (stopped()) return;
    ConnectionReceiver* receiver = receiver_;
    close();
    if (receiver != nullptr) receiver->onBroken(why, clean);
  }

  void writeSome() {
    const uint64_t before = queue_.bytesWritten();
    const int error = queue_.writeTo(fd_.get(), kBytesPerTurn);
    traffic_->sent.fetch_add(queue_.bytesWritten() - before, std::memory_order_relaxed);
    if (error == 0) return;
    send_error_ = "sending failed: " + textOf(error);
    read_wanted_ = true;  // the peer's final frames may be there
    queue_.clear();
  }

  // ---------------------------------------------------------------- reading

  // True: there is nothing more to read for now.
  bool readSome() {
    size_t budget = kBytesPerTurn;
    while (consumeInbox()) {
      size_t wanted = 0;
      const ssize_t count = receive(budget, &wanted);
      if (count < 0 && wouldBlock(errno)) return true;
      if (count <= 0) {
        endOfInput(count == 0 ? 0 : errno);
        return true;
      }
      const auto got = static_cast<size_t>(count);
      traffic_->received.fetch_add(got, std::memory_order_relaxed);
      accept(got);
      if (got < wanted || got >= budget) {
        const bool drained = got < wanted;
        consumeInbox();
        return drained;
      }
      budget -= got;
    }
    return false;
  }

  // One call reads the rest of a payload and, behind it, the next headers.
  ssize_t receive(size_t budget, size_t* wanted) {
    std::array<iovec, 2> list{};
    size_t count = 0;
    const size_t payload = in_frame_ ? std::min(remaining_, budget) : 0;
    if (payload > 0) list[count++] = {into_, payload};
    const bool whole = !in_frame_ || payload == remaining_;
    const size_t room = whole ? inbox_.size() - inbox_end_ : 0;
    if (room > 0) list[count++] = {inbox_.data() + inbox_end_, room};
    msghdr message{};
    message.msg_iov = list.data();
    message.msg_iovlen = count;
    *wanted = payload + room;
    return ::recvmsg(fd_.get(), &message, MSG_DONTWAIT);
  }

  void accept(size_t got) {
    const size_t of_payload = in_frame_ ? std::min(got, remaining_) : 0;
    if (in_frame_) {
      into_ += of_payload;
      remaining_ -= of_payload;
    }
    inbox_end_ += got - of_payload;
  }

  // Handles all that has been read. False: nothing more is wanted (paused or ended).
  bool consumeInbox() {
    while (!stopped()) {
      if (paused_) return false;
      if (in_frame_) {
        takePayloadFromInbox();
        if (remaining_ > 0) return true;
        deliver();
      } else if (inbox_end_ - inbox_begin_ >= kFrameHeaderBytes) {
        offerHeader();
      } else {
        std::memmove(inbox_.data(), inbox_.data() + inbox_begin_, inbox_end_ - inbox_begin_);
        inbox_end_ -= std::exchange(inbox_begin_, 0);
        return true;
      }
    }
    return false;
  }

  void takePayloadFromInbox() {
    const size_t part = std::min(remaining_, inbox_end_ - inbox_begin_);
    if (part > 0) std::memcpy(into_, inbox_.data() + inbox_begin_, part);
    into_ += part;
    remaining_ -= part;
    inbox_begin_ += part;
    if (inbox_begin_ == inbox_end_) inbox_begin_ = inbox_end_ = 0;
  }

  void offerHeader() {
    FrameBytes bytes;
    std::memcpy(bytes.data(), inbox_.data() + inbox_begin_, kFrameHeaderBytes);
    std::string why;
    const std::optional<FrameHeader> header = decodeHeader(bytes, &why);
    if (!header) return endWith("the peer sent no frame: " + why, false);
    Receipt receipt = receiver_->onHeader(*header);
    if (stopped()) return;
    switch (receipt.kind) {
      case Receipt::Kind::kWait:
        paused_ = true;
        return;
      case Receipt::Kind::kBreak:
        return endWith(receipt.why, false);
      case Receipt::Kind::kText:
        if (header->length > longestPayload(header->type)) {
          return endWith("the peer sent a text of " + std::to_string(header->length) + " bytes",
                         false);
        }
        text_.resize(header->length);
        return beginFrame(*header, reinterpret_cast<uint8_t*>(text_.data()), true);
      case Receipt::Kind::kInto:
        return beginFrame(*header, receipt.into, false);
    }
  }

  void beginFrame(const FrameHeader& header, uint8_t* into, bool is_text) {
    inbox_begin_ += kFrameHeaderBytes;
    header_ = header;
    into_ = into;
    remaining_ = header.length;
    in_frame_ = true;
    in_text_ = is_text;
  }

  void deliver() {
    in_frame_ = false;
    const FrameHeader header = header_;
    if (in_text_) {
      // What the kernel took before these words counts as sent: the peer may have had it already.
      runFinished();
      if (!stopped()) receiver_->onText(header, std::exchange(text_, {}));
    } else {
      receiver_->onFrame(header);
    }
  }

  void endOfInput(int error) {
    const bool inside = in_frame_ || inbox_end_ > inbox_begin_;
    if (error != 0) return endWith("receiving failed: " + textOf(error), false);
    endWith(
        inside ? "the peer closed the connection inside a frame" : "the peer closed the connection",
        !inside);
  }

  // ---------------------------------------------------------------- lingering

  void linger() {
    if (ended_) return;
    if (!send_error_.empty()) return close();
    if (queue_.empty() && !std::exchange(shut_down_, true)) ::shutdown(fd_.get(), SHUT_WR);
    updateInterest();
  }

  // Unread input at close() would make the kernel reset a TCP connection, and the texts would be
  // lost.
  void discardInput() {
    std::array<uint8_t, 16384> sink;
    for (size_t total = 0; total < kBytesPerTurn;) {
      const ssize_t count = ::recv(fd_.get(), sink.data(), sink.size(), MSG_DONTWAIT);
      if (count < 0 && wouldBlock(errno)) return;
      if (count <= 0) return close();
      total += static_cast<size_t>(count);
    }
  }

  EventLoop& loop_;
  UniqueFd fd_;
  const std::shared_ptr<Traffic> traffic_;
  const Duration closed_after_;
  ConnectionReceiver* receiver_ = nullptr;
  bool ended_ = false;
  bool watched_ = false;
  uint32_t interest_ = 0;
  bool call_back_posted_ = false;
  bool more_to_read_ = false;
  bool read_wanted_ = false;  // by the call that has been posted

  SendQueue queue_;
  std::string send_error_;

  bool paused_ = false;   // the header at inbox_begin_ was answered with kWait
  bool muted_ = false;    // the kernel is not asked for input
  bool hung_up_ = false;  // in order, while paused: looked at again after resume()
  bool in_frame_ = false;
  bool in_text_ = false;
  FrameHeader header_;
  uint8_t* into_ = nullptr;
  size_t remaining_ = 0;
  std::string text_;
  std::array<uint8_t, kInboxBytes> inbox_{};  // read, and not handled: [inbox_begin_, inbox_end_)
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;

  bool detached_ = false;
  bool lingering_ = false;  // implies detached_
  bool shut_down_ = false;
  EventLoop::TimerId linger_timer_ = 0;
};

}  // namespace

std::shared_ptr<Connection> makeStreamConnection(EventLoop& loop, UniqueFd fd,
                                                 std::shared_ptr<Traffic> traffic,
                                                 Duration closed_after) {
  const auto connection =
      std::make_shared<StreamConnection>(loop, std::move(fd), std::move(traffic), closed_after);
  return {connection.get(), [connection](Connection* released) { released->close(); }};
}

}  // namespace torchft_ext
