#include "net/probe.h"

#include <utility>

namespace torchft_ext {

Probe::Probe(EventLoop& loop, ProbeQuestion question, const ProbePatience& patience,
             Callback callback)
    : loop_(loop),
      question_(std::move(question)),
      course_(patience, Clock::now()),
      callback_(std::move(callback)) {
  ask();
}

Probe::~Probe() {
  loop_.cancel(retry_);
}

void Probe::ask() {
  asked_ = Clock::now();
  const SocketAddress& address = question_.addresses[tries_++ % question_.addresses.size()];
  const ProbeCourse::Bounds bounds = course_.nextBounds(asked_);
  dial_ = std::make_unique<Dial>(
      loop_, address, lifeQuestion(question_.self, question_.who, question_.channel),
      Welcome{{}, question_.who}, Deadline::after(bounds.connect), bounds.answer,
      [this](const Dial::Result& result) { onEnd(result); });
}

void Probe::onEnd(const Dial::Result& result) {
  const std::unique_ptr<Dial> spent = std::move(dial_);  // its callback is running
  const Clock::time_point now = Clock::now();
  const ProbeCourse::Step step = course_.onEnd(result, now);
  if (!step.answer) {
    retry_ = loop_.runAt(now + step.pause, [this] {
      retry_ = 0;
      ask();
    });
    return;
  }
  const bool lives = *step.answer == Liveness::kAlive;
  // The callback may destroy this object: nothing is touched after it.
  const Callback callback = std::exchange(callback_, nullptr);
  callback({*step.answer, lives ? std::string() : result.detail, now - asked_, tries_});
}

}  // namespace torchft_ext
