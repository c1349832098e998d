#include "net/probe.h"

#include <sys/epoll.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace torchft_ext {

Probe::Probe(EventLoop& loop, const SocketAddress& address, Deadline deadline, Callback callback)
    : loop_(loop), callback_(std::move(callback)) {
  std::string error;
  fd_ = startConnect(address, &error);
  if (!fd_) {
    // Refused at once (loopback): tell it from the loop's next turn, as every other answer.
    timer_ = loop_.runAt(Clock::now(), [this, error] { finish(Answer::kRefused, error); });
    return;
  }
  loop_.watch(fd_.get(), EPOLLOUT, [this](uint32_t) { onWritable(); });
  if (!deadline.isNever()) {
    timer_ = loop_.runAt(deadline.at(), [this] { finish(Answer::kUnreachable, "no answer"); });
  }
}

Probe::~Probe() {
  if (timer_ != 0) loop_.cancel(timer_);
  if (fd_) loop_.unwatch(fd_.get());
}

void Probe::onWritable() {
  const int error = pendingSocketError(fd_.get());
  const std::string detail = error == 0 ? std::string() : std::generic_category().message(error);
  if (error == 0) {
    finish(Answer::kAccepted, detail);
  } else if (error == ECONNREFUSED || error == ECONNRESET) {
    finish(Answer::kRefused, detail);
  } else {
    finish(Answer::kUnreachable, detail);
  }
}

void Probe::finish(Answer answer, const std::string& detail) {
  if (fd_) {
    loop_.unwatch(fd_.get());
    fd_.reset();
  }
  if (timer_ != 0) loop_.cancel(std::exchange(timer_, 0));
  // The callback may destroy this object: nothing is touched after it.
  Callback callback = std::exchange(callback_, nullptr);
  if (callback) callback(answer, detail);
}

}  // namespace torchft_ext
