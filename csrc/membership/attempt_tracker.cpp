#include "membership/attempt_tracker.h"

#include <algorithm>
#include <utility>

#include "base/member_incarnation.h"

namespace torchft_ext {
namespace {

bool isCausedBy(const Failure& failure, const MemberRecord& record) {
  return failure.cause.pid == record.pid && failure.cause.host == record.host;
}

bool isIn(const std::vector<MemberRecord>& members, const Token& token) {
  return std::any_of(members.begin(), members.end(),
                     [&](const MemberRecord& each) { return each.token == token; });
}

}  // namespace

bool isLoss(FailureKind kind) {
  return kind == FailureKind::kPeerLost || kind == FailureKind::kPeerLeft;
}

void AttemptMemory::noteFailure(const Failure& failure) {
  if (!isLoss(failure.kind)) return;
  const auto rank = static_cast<size_t>(failure.cause.rank);
  if (failure.cause.rank >= 0 && rank < members.size()) told.insert(members[rank].incarnation);
}

AttemptTracker::AttemptTracker(int rank, int size, const MemberRecord& self, AttemptMemory memory,
                               std::unique_ptr<MemberProber> prober)
    : rank_(rank),
      size_(size),
      self_(self),
      memory_(std::move(memory)),
      prober_(std::move(prober)) {
  updateProber();
}

// Records.

std::optional<Ending> AttemptTracker::judgeRecord(int rank, const std::string& bytes) {
  if (rank == rank_) return std::nullopt;
  if (const auto failure_record = decodeFailureRecord(bytes))
    return judgeFailureRecord(rank, *failure_record);
  auto record = decodeRecord(bytes);
  if (!record || record->incarnation == self_.incarnation) return std::nullopt;
  const auto known = here_.find(rank);
  if (known != here_.end() && known->second.token == record->token) return std::nullopt;
  seen_.insert(record->token);
  const Incarnation incarnation = record->incarnation;
  here_.insert_or_assign(rank, std::move(*record));
  updateProber();
  // Its end may have been seen before its record was. A freeze seen before may have passed since.
  const auto ended = gone_.find(incarnation);
  if (ended == gone_.end()) return std::nullopt;
  if (auto ending = judgeLiveness(ended->second)) ending_ = std::move(ending);
  return ending_;
}

std::optional<Ending> AttemptTracker::judgeFailureRecord(int rank,
                                                         const FailureRecord& failure_record) {
  const MemberRecord& member = failure_record.member;
  if (here_.erase(rank) > 0) updateProber();
  const Ending& ending = failure_record.ending;
  if (ownDoing(ending) || toldBefore(ending)) return std::nullopt;
  const bool faster = memory_.healthy && !memory_.elsewhere &&
                      inLastGeneration(member.incarnation) &&
                      ending.failure.kind != FailureKind::kTimeout;
  const auto& meant_for = failure_record.meant_for;
  const bool meant = std::find(meant_for.begin(), meant_for.end(), self_.token) != meant_for.end();
  // One of this process is of an earlier attempt; or else two ranks have the same incarnation.
  if (!meant && member.incarnation == self_.incarnation) return std::nullopt;
  const bool seen = seen_.count(member.token) > 0 || isIn(roster_, member.token);
  if (!seen && !meant && !faster) return std::nullopt;
  ending_ = ending;
  Cause& cause = ending_->failure.cause;
  if (cause.rank >= size_) cause.rank = -1;
  if (cause.rank < 0 && cause.pid < 0) {
    cause.rank = rank;
    cause.host = member.host;
    cause.pid = member.pid;
    cause.how = "its configure() failed: " + cause.how;
  }
  return ending_;
}

bool AttemptTracker::toldBefore(const Ending& ending) const {
  if (memory_.settled.count(ending.origin) > 0) return true;
  return isLoss(ending.failure.kind) && memory_.told.count(ending.culprit) > 0;
}

// An earlier attempt of this process, which it ended itself. What others lost of it, its process or
// its connection, or did not have of it in time, is their view.
bool AttemptTracker::ownDoing(const Ending& ending) const {
  const FailureKind kind = ending.failure.kind;
  const bool missed = kind == FailureKind::kPeerLost || kind == FailureKind::kConnectionLost ||
                      kind == FailureKind::kTimeout;
  return !missed && ending.culprit == self_.incarnation;
}

// Sights.

std::optional<Ending> AttemptTracker::judgeUpdates() {
  if (!hasUpdates()) return std::nullopt;
  std::optional<Ending> first;
  for (const MemberProber::Report& report : prober_->updates()) {
    auto ending = judgeLiveness(report);
    if (ending && !first) first = std::move(ending);
  }
  updateProber();
  if (first) ending_ = first;
  return first;
}

std::optional<Ending> AttemptTracker::judgeLiveness(const MemberProber::Report& report) {
  const Incarnation& incarnation = report.incarnation;
  if (report.liveness == Liveness::kAlive) {
    met_.insert(incarnation);
    memory_.told.erase(incarnation);  // it was frozen, or cut off, and is back
    left_over_.erase(incarnation);
    return std::nullopt;
  }
  const Whom whom = find(incarnation);
  if (whom.record == nullptr || !(whom.came || isPresumed(incarnation))) return std::nullopt;
  const bool met = met_.count(incarnation) > 0 ||
                   (memory_.healthy && inLastGeneration(incarnation)) || cameSince(whom) ||
                   (whom.came && report.liveness == Liveness::kSilent);
  if (!met || memory_.told.count(incarnation) > 0) {
    left_over_.insert(incarnation);
    if (report.liveness == Liveness::kGone) gone_.insert_or_assign(incarnation, report);
    return std::nullopt;
  }
  Ending ending;
  ending.failure.kind = FailureKind::kPeerLost;
  ending.failure.cause = {whom.rank, -1, whom.record->host, whom.record->pid,
                          report.how + (whom.came ? ", while the generation formed"
                                                  : ", before it came to the new generation")};
  if (whom.rank < 0) {
    ending.failure.cause.how = "a member of the last generation (host " + whom.record->host +
                               ", pid " + std::to_string(whom.record->pid) +
                               "): " + ending.failure.cause.how;
  }
  if (whom.came) ending.origin = whom.record->token;
  ending.culprit = incarnation;
  return ending;
}

AttemptTracker::Whom AttemptTracker::find(const Incarnation& incarnation) const {
  for (const auto& [rank, record] : here_) {
    if (record.incarnation == incarnation) return {rank, &record, true};
  }
  for (size_t rank = 0; rank < memory_.members.size(); ++rank) {
    const MemberRecord& member = memory_.members[rank];
    if (member.incarnation != incarnation) continue;
    return {
        ranksAreKept() && here_.count(static_cast<int>(rank)) == 0 ? static_cast<int>(rank) : -1,
        &member, false};
  }
  return {};
}

// As far as this member can tell: who has not come yet is to have its old rank.
bool AttemptTracker::ranksAreKept() const {
  const auto rank = static_cast<size_t>(rank_);
  return memory_.members.size() == static_cast<size_t>(size_) &&
         memory_.members[rank].incarnation == self_.incarnation;
}

bool AttemptTracker::inLastGeneration(const Incarnation& incarnation) const {
  return std::any_of(memory_.members.begin(), memory_.members.end(),
                     [&](const MemberRecord& each) { return each.incarnation == incarnation; });
}

// A member of the last generation that has written another record after that one. So it lived when
// the generation ended, whatever else ended then.
bool AttemptTracker::cameSince(const Whom& whom) const {
  return whom.came &&
         std::any_of(memory_.members.begin(), memory_.members.end(), [&](const auto& each) {
           return each.incarnation == whom.record->incarnation && each.token != whom.record->token;
         });
}

// Whom to watch.

std::vector<MemberRecord> AttemptTracker::presumed() const {
  std::vector<MemberRecord> members;
  size_t places = 0;  // that are taken if all of them come
  for (const auto& [rank, record] : here_) places += inLastGeneration(record.incarnation) ? 0 : 1;
  for (const MemberRecord& member : memory_.members) {
    if (memory_.told.count(member.incarnation) > 0) continue;
    ++places;
    const bool came = std::any_of(here_.begin(), here_.end(), [&](const auto& entry) {
      return entry.second.incarnation == member.incarnation;
    });
    // A thread of this process that is a rank too may have ended its group: that is no death.
    const bool of_this_process =
        processPartOf(member.incarnation) == processPartOf(self_.incarnation);
    if (!came && !of_this_process) members.push_back(member);
  }
  if (places > static_cast<size_t>(size_))
    members.clear();  // some are to stay out: who, is not known
  return members;
}

bool AttemptTracker::isPresumed(const Incarnation& incarnation) const {
  const auto members = presumed();
  return std::any_of(members.begin(), members.end(),
                     [&](const MemberRecord& each) { return each.incarnation == incarnation; });
}

void AttemptTracker::updateProber() {
  if (!prober_) return;
  std::vector<MemberRecord> watched;
  const auto leader = here_.find(0);
  const bool led =
      rank_ != 0 && leader != here_.end() && left_over_.count(leader->second.incarnation) == 0;
  if (led) {
    watched.push_back(leader->second);
  } else {
    watched = presumed();
    for (const auto& [rank, record] : here_) watched.push_back(record);
  }
  prober_->watch(std::move(watched));
}

// The end.

Ending AttemptTracker::endingOf(const Failure& failure) const {
  if (ending_ && ending_->failure.kind == failure.kind &&
      ending_->failure.cause.pid == failure.cause.pid &&
      ending_->failure.cause.rank == failure.cause.rank) {
    return *ending_;
  }
  Ending ending;
  ending.failure.kind = failure.kind;
  ending.failure.cause = failure.cause;
  ending.origin = self_.token;
  if (const MemberRecord* culprit = whoCaused(failure)) {
    ending.origin = culprit->token;
    ending.culprit = culprit->incarnation;
  }
  return ending;
}

const MemberRecord* AttemptTracker::whoCaused(const Failure& failure) const {
  const int rank = failure.cause.rank;
  if (rank == rank_ && isCausedBy(failure, self_)) return &self_;
  const auto here = here_.find(rank);
  if (here != here_.end() && isCausedBy(failure, here->second)) return &here->second;
  const auto index = static_cast<size_t>(std::max(rank, 0));
  if (index < roster_.size() && isCausedBy(failure, roster_[index])) return &roster_[index];
  for (const MemberRecord& member : memory_.members) {
    if (isCausedBy(failure, member)) return &member;
  }
  return nullptr;
}

AttemptMemory AttemptTracker::failed(const Ending& ending) {
  prober_.reset();
  // Another member, up already, began anew before this one was: its generation counts as the last.
  memory_.healthy = !roster_.empty() && ending.failure.kind == FailureKind::kAborted &&
                    ending.culprit != self_.incarnation;
  memory_.elsewhere = memory_.elsewhere && !memory_.healthy;
  if (memory_.healthy) memory_.members = std::move(roster_);
  memory_.settled.insert(self_.token);
  if (!ending.origin.isZero()) memory_.settled.insert(ending.origin);
  if (isLoss(ending.failure.kind) && !ending.culprit.isZero()) memory_.told.insert(ending.culprit);
  return std::move(memory_);
}

AttemptMemory AttemptTracker::formed(std::vector<MemberRecord> members) {
  prober_.reset();
  AttemptMemory memory;
  memory.members = std::move(members);
  memory.settled.insert(self_.token);  // another one's view of it, told late, is of no interest
  return memory;
}

}  // namespace torchft_ext
