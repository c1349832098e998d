#include "child/channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "comm/callbacks.h"

namespace torchft_ext::child {

UniqueFd processDescriptor(pid_t pid) {
#ifdef SYS_pidfd_open
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  return {};
#endif
}

// It is asked who the parent is after its descriptor was opened: the id may be another's by then.
Channel::Channel(UniqueFd socket, pid_t parent)
    : socket_(std::move(socket)),
      parent_(processDescriptor(parent)),
      orphaned_(::getppid() != parent) {}

std::optional<Channel::Frame> Channel::receive() {
  if (orphaned_ || !fill(kHeaderBytes)) return std::nullopt;
  const Header header = parseHeader(std::string_view(read_).substr(0, kHeaderBytes));
  const size_t whole = kHeaderBytes + header.bytes;
  if (!fill(whole)) return std::nullopt;
  Frame frame{header.kind, read_.substr(kHeaderBytes, header.bytes)};
  read_.erase(0, whole);
  return frame;
}

bool Channel::fill(size_t count) {
  std::array<char, 1U << 16U> buffer;
  while (read_.size() < count) {
    std::array<pollfd, 2> ends{pollfd{socket_.get(), POLLIN, 0}, pollfd{parent_.get(), POLLIN, 0}};
    if (::poll(ends.data(), ends.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    if (ends[0].revents == 0) return false;  // so it is the parent's end
    const ssize_t got = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    read_.append(buffer.data(), static_cast<size_t>(got));
  }
  return true;
}

void Channel::send(std::string_view frame) {
  {
    MutexLock lock(mutex_);
    unsent_ += frame;
    sendWhatFits();
    if (unsent_.empty() || has_sender_) return;
  }
  // Where no thread takes it, the next frame tries again, or this process is about to end.
  runOnCallbackThread([self = shared_from_this()] { self->sendRest(); });
}

void Channel::sendWhatFits() {
  size_t sent = 0;
  while (sent < unsent_.size()) {
    const ssize_t count = ::send(socket_.get(), unsent_.data() + sent, unsent_.size() - sent,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count <= 0) {  // nothing may follow half a frame
      ::shutdown(socket_.get(), SHUT_RDWR);
      sent = unsent_.size();
      break;
    }
    sent += static_cast<size_t>(count);
  }
  unsent_.erase(0, sent);
}

void Channel::sendRest() {
  {
    MutexLock lock(mutex_);
    if (has_sender_ || unsent_.empty()) return;
    has_sender_ = true;
  }
  while (true) {
    std::array<pollfd, 2> ready{
        {{socket_.get(), POLLOUT, 0}, {parent_.get(), POLLIN, 0}}};  // none: is passed over
    ::poll(ready.data(), ready.size(), -1);
    MutexLock lock(mutex_);
    sendWhatFits();
    if (ready[1].revents != 0) unsent_.clear();  // nobody reads it
    has_sender_ = !unsent_.empty();
    if (!has_sender_) return;
  }
}

}  // namespace torchft_ext::child
