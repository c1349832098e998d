#include "host/wait_inquiry.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "host/schedule.h"

namespace torchft_ext {
namespace {

// A text is one line, and an error's text has 500 bytes for others.
constexpr size_t kMostNamed = 3;

bool isOrdered(const WaitInquiry::Wait& wait) {
  return wait.op->place() != kNoPlace;
}

std::string nameOf(const IssueReport::Issued& issued) {
  const std::string kind = toString(issued.kind);
  return issued.seq < 0 ? kind + " in a callback" : kind + " #" + std::to_string(issued.seq);
}

std::string ago(Duration age) {
  return formatSeconds(std::chrono::floor<milliseconds>(age)) + " ago";
}

std::string andThread(const IssueReport& report) {
  const std::string thread = describe(report.main_thread);
  return thread.empty() ? "" : "; " + thread;
}

std::string lastOf(const IssueReport& report) {
  if (!report.last) return "it has issued no operation" + andThread(report);
  return "its last operation is " + nameOf(*report.last) + ", " + ago(report.last->age) +
         andThread(report);
}

// Where its collective at that place is another one.
std::string otherOf(const IssueReport& report, const WaitInquiry::Wait& wait) {
  const IssueReport::Issued& theirs = *report.asked;
  const bool other_root = theirs.kind == wait.op->kind();
  return "it issued " + nameOf(theirs) +
         (other_root ? " of root " + std::to_string(theirs.root) : "") + " in its place, " +
         ago(theirs.age) + andThread(report);
}

bool isAnother(const IssueReport::Issued& theirs, const WaitInquiry::Wait& wait) {
  const bool rooted = hasRoot(theirs.kind);
  return theirs.kind != wait.op->kind() || (rooted && theirs.root != wait.root);
}

// A receiver of its data waits for nobody else, whoever has not come to it yet.
bool waitsForRootAlone(const WaitInquiry::Wait& wait) {
  const OpKind kind = wait.op->kind();
  return kind == OpKind::kBroadcast || kind == OpKind::kScatter;
}

std::string lineOf(const OpState& op, const std::string& named, Clock::time_point now) {
  const GenerationIdentity& identity = op.lifecycle()->identity();
  const std::string number = op.seq() < 0 ? "" : " #" + std::to_string(op.seq());
  return op.describe() + number + " on '" + identity.group + "' (rank " +
         std::to_string(identity.rank) + "/" + std::to_string(identity.size) + ", generation " +
         std::to_string(identity.generation) + ") has waited " +
         formatSeconds(std::chrono::floor<milliseconds>(now - op.issuedAt())) + " for " + named;
}

}  // namespace

void WaitInquiry::waits(const std::vector<Wait>& waits, Clock::time_point now) {
  dropEnded();
  dropOthers(waits);
  if (waits.empty()) return;
  uint64_t place = kNoPlace;
  for (const Wait& wait : waits) place = std::min(place, wait.op->place());
  for (const Wait& wait : waits) {
    entryOf(wait).wait = wait;
    for (const int rank : wait.peers) ask(rank, place, now);
  }
  callbacks_.wake(now + kAnswerWithin);
  for (Entry& entry : entries_) {
    if (isKnown(entry, now)) conclude(entry, now);
  }
}

WaitInquiry::Entry& WaitInquiry::entryOf(const Wait& wait) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&wait](const Entry& entry) { return entry.wait.op == wait.op; });
  if (found != entries_.end()) return *found;
  Entry entry{wait};
  entry.counted_until = wait.op->issuedAt();
  entries_.push_back(std::move(entry));
  return entries_.back();
}

// One that does not answer is not asked again: what it gets when it goes on is that one question.
void WaitInquiry::ask(int rank, uint64_t place, Clock::time_point now) {
  Peer& asked = peer(rank);
  const bool again = asked.asked_at != Clock::time_point::min();
  if (asked.awaited || (again && now - asked.asked_at < kAskEvery)) return;
  asked.asked_at = now;
  asked.awaited = true;
  callbacks_.ask(rank, place);
}

void WaitInquiry::reported(int rank, const IssueReport& report, Clock::time_point now) {
  Peer& reporter = peer(rank);
  if (!std::exchange(reporter.awaited, false)) return;
  reporter.report = report;
  dropEnded();
  for (Entry& entry : entries_) {
    const auto& peers = entry.wait.peers;
    const bool concerned = std::find(peers.begin(), peers.end(), rank) != peers.end();
    if (concerned && isKnown(entry, now)) conclude(entry, now);
  }
}

void WaitInquiry::settle(Clock::time_point now) {
  dropEnded();
  for (Entry& entry : entries_) {
    if (isKnown(entry, now)) conclude(entry, now);
  }
}

bool WaitInquiry::isKnown(const Entry& entry, Clock::time_point now) {
  const auto& peers = entry.wait.peers;
  return std::all_of(peers.begin(), peers.end(), [this, now](int rank) {
    const Peer& asked = peer(rank);
    return !asked.awaited || now - asked.asked_at >= kAnswerWithin;
  });
}

std::string WaitInquiry::whyNamed(const Wait& wait, int rank, Clock::time_point now) {
  const Peer& asked = peer(rank);
  if (asked.awaited)
    return "it has not answered for " +
           formatSeconds(std::chrono::floor<milliseconds>(now - asked.asked_at)) +
           ": it is stopped, or cannot be reached";
  const IssueReport& report = asked.report;
  if (!isOrdered(wait) || report.collectives <= wait.op->place()) return lastOf(report);
  const bool compares = report.place == wait.op->place() && report.asked;
  return compares && isAnother(*report.asked, wait) ? otherOf(report, wait) : "";
}

WaitInquiry::Known WaitInquiry::judge(const Wait& wait, Clock::time_point now) {
  Known known;
  std::vector<std::string> clauses;
  for (const int rank : wait.peers) {
    std::string why = whyNamed(wait, rank, now);
    if (why.empty()) continue;
    const bool alone = isOrdered(wait) && waitsForRootAlone(wait) && rank == wait.root;
    if (alone) {
      known.named.clear();
      clauses.clear();
    }
    known.named.push_back(rank);
    clauses.push_back(callbacks_.name(rank) + ": " + std::move(why));
    if (alone) break;
  }
  for (size_t i = 0; i < std::min(clauses.size(), kMostNamed); ++i)
    known.text += (i == 0 ? "" : "; and for ") + clauses[i];
  if (clauses.size() > kMostNamed)
    known.text += "; and for " + std::to_string(clauses.size() - kMostNamed) + " more";
  return known;
}

void WaitInquiry::conclude(Entry& entry, Clock::time_point now) {
  OpState& op = *entry.wait.op;
  Known known = judge(entry.wait, now);
  entry.named = known.named;
  count(entry, now);
  op.setWaitedFor(known.text, known.named);
  const bool long_enough = now - op.issuedAt() >= op.lifecycle()->askAfter();
  if (known.named.empty() || entry.logged || !entry.wait.in_log || !long_enough) return;
  entry.logged = true;
  log(LogLevel::kWarning, lineOf(op, known.text, now));
}

void WaitInquiry::count(Entry& entry, Clock::time_point until) {
  const Duration waited = until - entry.counted_until;
  if (waited <= Duration::zero()) return;
  entry.counted_until = until;
  for (const int rank : entry.named) times_->add(rank, waited);
}

// With what it waited since it was last counted.
void WaitInquiry::dropEnded() {
  std::erase_if(entries_, [this](Entry& entry) {
    const auto took = entry.wait.op->took();
    if (took) count(entry, entry.wait.op->issuedAt() + *took);
    return took.has_value();
  });
}

void WaitInquiry::dropOthers(const std::vector<Wait>& waits) {
  std::erase_if(entries_, [&waits](const Entry& entry) {
    const bool waits_still = std::any_of(waits.begin(), waits.end(), [&entry](const Wait& wait) {
      return wait.op == entry.wait.op;
    });
    if (!waits_still) entry.wait.op->setWaitedFor("", {});
    return !waits_still;
  });
}

}  // namespace torchft_ext
