// Whether what a member of a simulated world is told is true.
#include <algorithm>

#include "cpp/liveness/monitor_process.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kLongestConnect{2};  // the detector's

}  // namespace

void MonitorWorld::addToDigest(int number, int member, const Failure& failure) {
  const std::string told = std::to_string(number) + ' ' + std::to_string(member) + ' ' +
                           std::to_string(now_.time_since_epoch().count()) + ' ' +
                           failure.describe();
  for (const char letter : told)  // FNV-1a's steps
    digest_ = (digest_ ^ static_cast<uint8_t>(letter)) * 0x100000001b3U;
}

void MonitorWorld::judge(int number, int member, const Failure& failure) {
  addToDigest(number, member, failure);
  const bool first = told_.emplace(Pair{number, member}, Told{failure, hops_heard_}).second;
  EXPECT_TRUE(first) << "told twice";
  EXPECT_TRUE(isTrue(generations_[static_cast<size_t>(number)], failure))
      << "generation " << number << ", process " << member << " was told: " << failure.describe();
}

bool MonitorWorld::isTrue(const Generation& generation, const Failure& failure) const {
  const auto size = static_cast<int>(generation.members.size());
  const Cause& cause = failure.cause;
  if (cause.rank < 0 || cause.rank >= size || cause.other_rank >= size) return false;
  const int culprit = generation.members[static_cast<size_t>(cause.rank)];
  if (failure.kind == FailureKind::kAborted) return generation.aborters.count(culprit) > 0;
  if (failure.kind == FailureKind::kConnectionLost) {
    const int other = generation.members[static_cast<size_t>(cause.other_rank)];
    return ever_cut_.count(pairOf(culprit, other)) > 0 || wasHeardLate(generation, other);
  }
  return failure.kind == FailureKind::kPeerLost &&
         (ever_killed_.count(culprit) > 0 || ever_exited_.count(culprit) > 0 ||
          wasOutOfReach(generation, culprit));
}

// Frozen, or cut off from another member, for so long that it may be held for lost though it lives.
// The shortest silence that reaches the limit is that of a process that freezes just before its
// next beat, and whose beat after that takes longest; a probe begins to look up to one delay late.
bool MonitorWorld::wasOutOfReach(const Generation& generation, int process) const {
  const Duration limit = options_.heartbeat_limit;
  const Duration slowest = options_.longest_delay + options_.resent_after;
  const Duration patience =
      limit == Duration::zero() ? kLongestConnect : std::min<Duration>(limit, kLongestConnect);
  const auto absences = [](const auto& all, const auto& key) {
    const auto found = all.find(key);
    return found == all.end() ? Spans{} : found->second;
  };
  return std::any_of(generation.members.begin(), generation.members.end(), [&](int other) {
    if (other == process) return false;
    Spans spans = absences(frozen_, process);
    const Spans blocked = absences(blocked_, pairOf(process, other));
    spans.insert(spans.end(), blocked.begin(), blocked.end());
    return longestOf(std::move(spans)) >= patience - limit / kBeatsPerLimit - slowest;
  });
}

// What it sent since it thawed, or was lost and sent again, may come after the limit, though others
// have reached it: then the connection counts as lost. A process that did not run meanwhile does
// not.
bool MonitorWorld::wasHeardLate(const Generation& generation, int process) const {
  const auto found = frozen_.find(process);
  const Duration lately =
      2 * options_.heartbeat_limit + options_.longest_delay + options_.resent_after;
  const bool ran = found == frozen_.end() || found->second.back().to < Time::max() ||
                   now_ - found->second.back().from <= lately;
  return ran && wasOutOfReach(generation, process);
}

// What is too short for a probe to see counts as no pause.
Duration MonitorWorld::longestOf(Spans spans) const {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.from < b.from; });
  Duration longest{0};
  Span whole;
  for (const Span& span : spans) {
    if (&span == &spans.front() || span.from > whole.to + kProbeLook)
      whole = {span.from, span.from};
    whole.to = std::max(whole.to, std::min(span.to, now_));
    longest = std::max(longest, Duration(whole.to - whole.from));
  }
  return longest;
}

}  // namespace torchft_ext
