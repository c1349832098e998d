#include "net/probe.h"

#include <sys/epoll.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace torchft_ext {

Probe::Probe(EventLoop& loop, const SocketAddress& address, const Incarnation& who,
             Deadline deadline, Callback callback)
    : loop_(loop), who_(who), callback_(std::move(callback)) {
  std::string error;
  fd_ = startConnect(address, &error);
  if (!fd_) {
    // Refused at once (loopback): tell it from the loop's next turn, as every other answer.
    timer_ = loop_.runAt(Clock::now(), [this, error] { finish(Answer::kGone, error); });
    return;
  }
  loop_.watch(fd_.get(), EPOLLOUT, [this](uint32_t) {
    if (connected_) {
      onReadable();
    } else {
      onConnected();
    }
  });
  if (deadline.isNever()) return;
  timer_ = loop_.runAt(deadline.at(), [this] {
    finish(connected_ ? Answer::kSilent : Answer::kUnreachable, "no answer");
  });
}

Probe::~Probe() {
  if (timer_ != 0) loop_.cancel(timer_);
  if (fd_) loop_.unwatch(fd_.get());
}

void Probe::onConnected() {
  const int error = pendingSocketError(fd_.get());
  const std::string detail = std::generic_category().message(error);
  if (error == ECONNREFUSED || error == ECONNRESET) {
    finish(Answer::kGone, detail);
    return;
  }
  if (error != 0) {
    finish(Answer::kUnreachable, detail);
    return;
  }
  Hello question;  // of no epoch, with no proof
  question.from = selfIncarnation();
  question.to = who_;
  question.rank = 0;
  if (!sendWhole(fd_.get(), encodeHello(question))) {
    finish(Answer::kGone, "the connection ended at once");
    return;
  }
  connected_ = true;
  loop_.modify(fd_.get(), EPOLLIN);
}

void Probe::onReadable() {
  const FrameInbox::State state = inbox_.readFrom(fd_.get());
  if (state == FrameInbox::State::kMore) return;
  const auto refusal = decodeRefusal(inbox_.payload());
  if (state != FrameInbox::State::kWhole || !refusal) {
    finish(Answer::kGone, inbox_.why());
  } else if (refusal->code == RefusalCode::kWrongProcess) {
    finish(Answer::kGone, refusal->reason);
  } else {
    finish(Answer::kAnswered, {});
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
