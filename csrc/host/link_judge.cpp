#include "host/link_judge.h"

#include <utility>

#include "net/local_address.h"

namespace torchft_ext {
namespace {

constexpr Duration kLastWordsMayTake = std::chrono::milliseconds(100);
// Longer than the peer monitor takes, which asks others too and so can tell a route that is gone
// from a host that is.
constexpr Duration kProbeWithin = std::chrono::seconds(3);

}  // namespace

LinkJudge::LinkJudge(EventLoop& loop, const Roster& roster, Verdict verdict)
    : loop_(loop), roster_(roster), verdict_(std::move(verdict)) {}

LinkJudge::~LinkJudge() {
  for (auto& [rank, each] : cases_) {
    if (each.timer != 0) loop_.cancel(each.timer);
  }
}

void LinkJudge::laneEnded(int rank, Lane lane) {
  const bool first = cases_.count(rank) == 0;
  if (lane == kControl) {
    ask(rank);
  } else if (first) {
    cases_[rank].timer = loop_.runAt(Clock::now() + kLastWordsMayTake, [this, rank] {
      cases_.at(rank).timer = 0;
      ask(rank);
    });
  }
}

void LinkJudge::ask(int rank) {
  Case& asked = cases_[rank];
  if (asked.probe) return;
  if (asked.timer != 0) loop_.cancel(std::exchange(asked.timer, 0));
  const MemberRecord& member = roster_.members[static_cast<size_t>(rank)];
  const std::vector<SocketAddress> doors = withoutLocal(member.addresses);
  if (doors.empty()) {
    const Verdict verdict = verdict_;
    return verdict(rank, FailureKind::kPeerLost, "its connections closed");
  }
  asked.probe = std::make_unique<Probe>(
      loop_, doors.front(), member.incarnation, Deadline::after(kProbeWithin),
      [this, rank](Probe::Answer answer, const std::string& detail) {
        onAnswer(rank, answer, detail);
      });
}

void LinkJudge::onAnswer(int rank, Probe::Answer answer, const std::string& detail) {
  const Verdict verdict = verdict_;  // it may destroy this object
  switch (answer) {
    case Probe::Answer::kAnswered:
      return verdict(rank, FailureKind::kLinkLost,
                     "the connection broke although its process lives");
    case Probe::Answer::kGone:
      return verdict(rank, FailureKind::kPeerLost, "its process ended");
    case Probe::Answer::kSilent:
      return verdict(rank, FailureKind::kPeerLost, "its connection broke and it does not answer");
    case Probe::Answer::kUnreachable:
      return verdict(rank, FailureKind::kPeerLost, "its host cannot be reached (" + detail + ")");
    case Probe::Answer::kUnknown:
      return verdict(
          rank, FailureKind::kLinkLost,
          "the connection broke, and this process could not ask whether it lives (" + detail + ")");
  }
}

}  // namespace torchft_ext
