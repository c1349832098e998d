#include "net/probe.h"

#include <sys/epoll.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace torchft_ext {
namespace {

constexpr Duration kRetryAfter = std::chrono::milliseconds(5);

}  // namespace

Probe::Probe(EventLoop& loop, const SocketAddress& address, const Incarnation& who,
             Deadline deadline, Callback callback)
    : loop_(loop), address_(address), who_(who), callback_(std::move(callback)) {
  if (!deadline.isNever()) {
    timer_ = loop_.runAt(deadline.at(), [this] {
      timer_ = 0;
      finish(connected_ ? Answer::kSilent : Answer::kUnreachable, "no answer");
    });
  }
  connect();
}

Probe::~Probe() {
  if (timer_ != 0) loop_.cancel(timer_);
  if (retry_ != 0) loop_.cancel(retry_);
  if (fd_) loop_.unwatch(fd_.get());
}

void Probe::connect() {
  std::string error;
  fd_ = startConnect(address_, &error);
  if (!fd_) {
    // Refused at once (loopback): tell it from the loop's next turn, as every other answer.
    retry_ = loop_.runAt(Clock::now(), [this, error] {
      retry_ = 0;
      finish(Answer::kGone, error);
    });
    return;
  }
  inbox_.emplace(std::vector<FrameType>{FrameType::kRefused, FrameType::kWelcome});
  loop_.watch(fd_.get(), EPOLLOUT, [this](uint32_t) {
    if (connected_) {
      onReadable();
    } else {
      onConnected();
    }
  });
}

void Probe::onConnected() {
  const int error = pendingSocketError(fd_.get());
  const std::string detail = std::generic_category().message(error);
  if (error == ECONNREFUSED) {
    finish(Answer::kGone, detail);
    return;
  }
  if (error == ECONNRESET) {
    onNoWord(detail);
    return;
  }
  if (error != 0) {
    finish(Answer::kUnreachable, detail);
    return;
  }
  Hello question;  // with no proof
  question.nonce = kProbeNonce;
  question.from = selfIncarnation();
  question.to = who_;
  question.rank = 0;
  if (!sendWhole(fd_.get(), encodeHello(question))) {
    onNoWord("the connection ended at once");
    return;
  }
  connected_ = true;
  loop_.modify(fd_.get(), EPOLLIN);
}

void Probe::onReadable() {
  const FrameInbox::State state = inbox_->readFrom(fd_.get());
  if (state == FrameInbox::State::kMore) return;
  if (state == FrameInbox::State::kClosed) {
    onNoWord(inbox_->why());
    return;
  }
  if (state == FrameInbox::State::kWhole && isAnswerOfIts()) {
    finish(Answer::kAnswered, {});
  } else {
    finish(Answer::kGone, "another process answered");
  }
}

bool Probe::isAnswerOfIts() const {
  if (inbox_->header().type == FrameType::kWelcome) {
    const auto welcome = decodeWelcome(inbox_->payload());
    return welcome && welcome->from == who_;
  }
  const auto refusal = decodeRefusal(inbox_->payload());
  return refusal && refusal->code != RefusalCode::kWrongProcess;
}

void Probe::onNoWord(const std::string& detail) {
  if (--tries_left_ == 0) {
    finish(Answer::kGone, detail);
    return;
  }
  closeConnection();
  retry_ = loop_.runAt(Clock::now() + kRetryAfter, [this] {
    retry_ = 0;
    connect();
  });
}

void Probe::closeConnection() {
  connected_ = false;
  if (!fd_) return;
  loop_.unwatch(fd_.get());
  fd_.reset();
}

void Probe::finish(Answer answer, const std::string& detail) {
  closeConnection();
  if (timer_ != 0) loop_.cancel(std::exchange(timer_, 0));
  if (retry_ != 0) loop_.cancel(std::exchange(retry_, 0));
  // The callback may destroy this object: nothing is touched after it.
  Callback callback = std::exchange(callback_, nullptr);
  if (callback) callback(answer, detail);
}

}  // namespace torchft_ext
