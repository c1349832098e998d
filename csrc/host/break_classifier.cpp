#include "host/break_classifier.h"

#include <utility>

#include "net/local_address.h"

namespace torchft_ext {
namespace {

constexpr Duration kFinalFrameMayTake = std::chrono::milliseconds(100);
// Longer than the peer monitor takes, which asks others too and so can tell a route that is gone
// from a host that is.
constexpr Duration kProbeWithin = std::chrono::seconds(3);

}  // namespace

BreakClassifier::BreakClassifier(EventLoop& loop, const Roster& roster, OnResult result)
    : loop_(loop), roster_(roster), on_result_(std::move(result)) {}

BreakClassifier::~BreakClassifier() {
  for (auto& [rank, each] : cases_) {
    if (each.timer != 0) loop_.cancel(each.timer);
  }
}

void BreakClassifier::channelEnded(int rank, Channel channel) {
  const bool first = cases_.count(rank) == 0;
  if (channel == kControl) {
    ask(rank);
  } else if (first) {
    cases_[rank].timer = loop_.runAt(Clock::now() + kFinalFrameMayTake, [this, rank] {
      cases_.at(rank).timer = 0;
      ask(rank);
    });
  }
}

void BreakClassifier::forget(int rank) {
  const auto found = cases_.find(rank);
  if (found == cases_.end()) return;
  if (found->second.timer != 0) loop_.cancel(found->second.timer);
  cases_.erase(found);
}

void BreakClassifier::ask(int rank) {
  Case& asked = cases_[rank];
  if (asked.probe) return;
  if (asked.timer != 0) loop_.cancel(std::exchange(asked.timer, 0));
  const MemberRecord& member = roster_.members[static_cast<size_t>(rank)];
  const std::vector<SocketAddress> addresses = withoutLocal(member.addresses);
  if (addresses.empty()) {
    const OnResult result = on_result_;
    return result(rank, FailureKind::kPeerLost, "its connections closed");
  }
  ProbePatience patience;
  patience.connect = kProbeWithin;
  asked.probe = std::make_unique<Probe>(
      loop_, ProbeQuestion{selfIncarnation(), member.incarnation, {addresses.front()}}, patience,
      [this, rank](const ProbeAnswer& answer) { onAnswer(rank, answer); });
}

void BreakClassifier::onAnswer(int rank, const ProbeAnswer& answer) {
  const OnResult result = on_result_;  // it may destroy this object
  switch (answer.liveness) {
    case Liveness::kAlive:
      return result(rank, FailureKind::kConnectionLost,
                    "the connection broke although its process lives");
    case Liveness::kGone:
      return result(rank, FailureKind::kPeerLost, "its process ended");
    case Liveness::kSilent:
      return result(rank, FailureKind::kPeerLost, "its connection broke and it does not answer");
    case Liveness::kUnreachable:
      return result(rank, FailureKind::kPeerLost,
                    "its host cannot be reached (" + answer.detail + ")");
    case Liveness::kUnknown:
      return result(rank, FailureKind::kConnectionLost,
                    "the connection broke, and this process could not ask whether it lives (" +
                        answer.detail + ")");
  }
}

}  // namespace torchft_ext
