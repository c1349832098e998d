#include "net/probe.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {
namespace {

constexpr Duration kRetryAfter = std::chrono::milliseconds(5);
constexpr Duration kLeastTime = std::chrono::milliseconds(100);  // for one question

}  // namespace

Probe::Probe(EventLoop& loop, const SocketAddress& address, const Incarnation& who,
             Deadline deadline, Callback callback)
    : loop_(loop),
      address_(address),
      who_(who),
      deadline_(deadline),
      callback_(std::move(callback)) {
  ask();
}

Probe::~Probe() {
  if (retry_ != 0) loop_.cancel(retry_);
}

void Probe::ask() {
  const Duration left = deadline_.isNever()
                            ? Duration(-1)
                            : std::max<Duration>(deadline_.at() - Clock::now(), kLeastTime);
  dial_ = std::make_unique<Dial>(loop_, address_, lifeQuestion(selfIncarnation(), who_),
                                 Welcome{{}, who_}, Deadline::after(left), left,
                                 [this](const Dial::Result& result) { onEnd(result); });
}

void Probe::askAgain() {
  retry_ = loop_.runAt(Clock::now() + kRetryAfter, [this] {
    retry_ = 0;
    ask();
  });
}

void Probe::onEnd(const Dial::Result& result) {
  const std::unique_ptr<Dial> spent = std::move(dial_);  // its callback is running
  const std::optional<Liveness> shown = livenessShownBy(result);
  if (!shown) return onUnclear(result);
  finish(*shown, *shown == Liveness::kAlive ? std::string() : result.detail);
}

void Probe::onUnclear(const Dial::Result& result) {
  if (result.end == Dial::End::kBroken && --tries_left_ == 0) {
    return finish(Liveness::kGone, result.detail);
  }
  if (result.end != Dial::End::kBroken && deadline_.expired()) {
    const bool unreachable = result.end == Dial::End::kUnreachable;
    return finish(unreachable ? Liveness::kUnreachable : Liveness::kUnknown, result.detail);
  }
  askAgain();
}

void Probe::finish(Liveness answer, const std::string& detail) {
  // The callback may destroy this object: nothing is touched after it.
  const Callback callback = std::exchange(callback_, nullptr);
  if (callback) callback(answer, detail);
}

}  // namespace torchft_ext
