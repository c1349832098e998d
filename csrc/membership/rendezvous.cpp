#include "membership/rendezvous.h"

#include <algorithm>
#include <map>
#include <utility>

#include "membership/rendezvous_failure.h"

namespace torchft_ext {
namespace {

// How often a waiting member makes sure of its own record: at first, and at most. Also how long
// rank 0 bears with records that contradict each other (they may be left over from an earlier
// attempt).
constexpr milliseconds kFirstOwnCheck{10};
constexpr milliseconds kOwnCheck{1000};
// How often a waiting member looks at what others have put in the store, and between such looks at
// what it waits for, until it has been answered at least, if that does not take too long; and at
// how many records in one go.
constexpr milliseconds kLook{15};
constexpr milliseconds kLongestLook = StoreThread::kStuckAfter;
constexpr milliseconds kSteadyPause{5};
constexpr int kScan = 8;
// Of how many members rank 0 awaits the records at first, its own included.
constexpr int kFirstAwaited = 64;
// Kept back for finding out who is missing; a fifth of a short timeout. The others keep back less,
// so that they hear from rank 0, whose time is up then too as a rule, whom it has missed.
constexpr milliseconds kNamingTime{500};
constexpr int kNamingShare = 5;
constexpr int kFollowersPart = 4;
constexpr const char* kUnanswered = " (the store did not say in time who else is missing)";
// While connections are made: how long one look may take (the connections may be up meanwhile), and
// how long a store may be lost that some members may still need.
constexpr milliseconds kRefreshWithin{1000};
constexpr milliseconds kSilentFor{100};  // a look that ends earlier without an answer tells nothing
constexpr milliseconds kLostFor{2000};

// The first two ranks that have the same incarnation.
std::optional<std::pair<int, int>> findDuplicates(const std::vector<MemberRecord>& members) {
  std::map<Incarnation, int> seen;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const auto [entry, fresh] = seen.emplace(members[rank].incarnation, static_cast<int>(rank));
    if (!fresh) return std::pair(entry->second, static_cast<int>(rank));
  }
  return std::nullopt;
}

// The first rank that came for something else than rank 0.
std::optional<size_t> findOtherPurpose(const std::vector<MemberRecord>& members) {
  for (size_t rank = 1; rank < members.size(); ++rank) {
    if (members[rank].purpose != members[0].purpose) return rank;
  }
  return std::nullopt;
}

// Empty if a record is malformed; *malformed says whose.
std::vector<MemberRecord> decodeAll(const std::vector<std::string>& records, int* malformed) {
  std::vector<MemberRecord> members;
  for (const std::string& bytes : records) {
    auto member = decodeRecord(bytes);
    if (!member) {
      *malformed = static_cast<int>(members.size());
      return {};
    }
    members.push_back(std::move(*member));
  }
  return members;
}

// Malformed records are let through: waiting does not mend them, the reader says what is wrong.
bool withoutDuplicates(const std::vector<std::string>& records) {
  int malformed = -1;
  return !findDuplicates(decodeAll(records, &malformed));
}

bool allHere(const std::vector<std::string>& records, const std::set<Incarnation>& left_over) {
  return std::none_of(records.begin(), records.end(), [&](const std::string& bytes) {
    if (decodeFailureRecord(bytes)) return true;
    const auto record = decodeRecord(bytes);
    return record && left_over.count(record->incarnation) > 0;
  });
}

// When a waiting member makes sure of its own record.
class OwnCheck {
 public:
  bool due() {
    if (!next_.expired()) return false;
    next_ = Deadline::after(pause_);
    pause_ = std::min<Duration>(2 * pause_, kOwnCheck);
    return true;
  }
  bool patient() const { return pause_ >= kOwnCheck; }

 private:
  Duration pause_ = 2 * kFirstOwnCheck;
  Deadline next_ = Deadline::after(kFirstOwnCheck);
};

}  // namespace

Rendezvous::Rendezvous(std::shared_ptr<StoreThread> store, std::string prefix, int rank, int size,
                       MemberRecord self, Deadline deadline, Cancelled cancelled,
                       AttemptMemory memory, std::unique_ptr<MemberProber> prober)
    : store_(std::move(store)),
      limit_(std::in_place, store_, deadline.remaining()),
      keys_(std::move(prefix), rank, size),
      rank_(rank),
      size_(size),
      deadline_(deadline),
      cancelled_(std::move(cancelled)),
      own_(store_, keys_, rank, std::move(self), deadline, cancelled_),
      tracker_(rank, size, own_.self(), std::move(memory), std::move(prober)) {}

Rendezvous::~Rendezvous() {
  own_.remove(/*at_once=*/false);
  removeRosters();
}

AttemptMemory Rendezvous::formed() {
  limit_.reset();
  return tracker_.formed(current_.members);
}

AttemptMemory Rendezvous::publishFailure(const Failure& why) {
  limit_.reset();
  const Ending ending = tracker_.endingOf(why);
  own_.publishFailure(ending);
  if (mayBeMissed(ending)) awaited_ = readersBut(ending.failure.cause.rank);
  return tracker_.failed(ending);
}

// Who has had a roster has seen the record, or is addressed. One's own end is no news to wait for,
// and what ran out of time leaves none.
bool Rendezvous::mayBeMissed(const Ending& ending) const {
  const FailureKind kind = ending.failure.kind;
  return rank_ == 0 && size_ > 2 && tracker_.isFirstGeneration() && current_.members.empty() &&
         ending.origin != own_.self().token && kind != FailureKind::kTimeout &&
         kind != FailureKind::kStoreLost;
}

std::vector<std::string> Rendezvous::readersBut(int rank) const {
  auto readers = keys_.readers();
  std::erase(readers, keys_.of(rank));
  return readers;
}

void Rendezvous::awaitReaders(Deadline until, const Cancelled& cancelled) {
  own_.awaitReaders(std::exchange(awaited_, {}), deadline_.orEarlier(until), cancelled);
}

void Rendezvous::publishFailedInit(const Failure& why, Duration readers_within) {
  own_.publishFailedInit(tracker_.endingOf(why));
  // Behind the write: the store may be slow to answer at first.
  const auto written = store_->getEach({keys_.own()}, deadline_, cancelled_);
  if (written.status != StoreStatus::kOk) return;
  own_.awaitReaders(keys_.readers(), deadline_.orEarlier(readers_within), cancelled_);
}

void Rendezvous::succeeded() {
  own_.remove(/*at_once=*/true);
  removeRosters();
}

void Rendezvous::leaveStore(Duration within) {
  succeeded();
  // An empty look comes behind the deletions.
  store_->getEach({}, deadline_.orEarlier(within), cancelled_);
}

void Rendezvous::removeRosters() {
  std::vector<std::string> rubbish;
  rubbish.reserve(issued_.size());
  for (const Token& token : issued_) rubbish.push_back(keys_.go(token));
  issued_.clear();
  store_->removeLater(std::move(rubbish));
}

std::variant<Roster, Failure> Rendezvous::enter() {
  if (auto failure = own_.publish()) return *failure;
  if (size_ == 1) {
    // A set alone does not wait for the server: without an answer a lost store would go unnoticed.
    if (auto failure = own_.check()) return *failure;
    return issue({encodeRecord(own_.self())});
  }
  return rank_ == 0 ? lead() : follow();
}

std::variant<std::monostate, Roster, Failure> Rendezvous::refresh() {
  return rank_ == 0 ? refreshLeader() : refreshFollower();
}

// Who else has come, and who has gone.

Cancelled Rendezvous::updatesOrCancelled() {
  return [this] {
    gave_up_ = gave_up_ || (cancelled_ && cancelled_());
    return gave_up_ || tracker_.hasUpdates();
  };
}

// Nothing is wrong: the wait was over, or there is news to judge.
bool Rendezvous::interrupted(const StoreReply& reply) {
  return reply.status == StoreStatus::kTimedOut ||
         (reply.status == StoreStatus::kCancelled && !gave_up_);
}

std::optional<Failure> Rendezvous::judgeUpdates() {
  auto ending = tracker_.judgeUpdates();
  return ending ? std::optional(std::move(ending->failure)) : std::nullopt;
}

// Empty ones are of ranks that have not come.
std::optional<Failure> Rendezvous::judgeRecords(int first,
                                                const std::vector<std::string>& records) {
  for (size_t i = 0; i < records.size(); ++i) {
    auto ending = tracker_.judgeRecord(first + static_cast<int>(i), records[i]);
    if (!ending) continue;
    Failure& failure = ending->failure;
    if (rank_ == 0 && failure.kind == FailureKind::kTimeout) {
      const int ended = first + static_cast<int>(i);
      if (const std::string names = missing().nameMembers(ended); !names.empty())
        failure.cause.how += "; " + names;
    }
    return std::move(failure);
  }
  return std::nullopt;
}

// A few of the others' records at a time.
std::optional<Failure> Rendezvous::scan() {
  const int first = rank_ == 0 ? next_in_scan_ : 0;
  const int last = rank_ == 0 ? std::min(size_, first + kScan) : 1;
  const auto reply = store_->getEach(keys_.range(first, last), deadline_, updatesOrCancelled());
  if (reply.status == StoreStatus::kCancelled && !gave_up_) return std::nullopt;
  if (reply.status != StoreStatus::kOk) return failureOf(reply);
  next_in_scan_ = last == size_ ? 1 : last;
  return judgeRecords(first, reply.values);
}

StoreThread::Acceptable Rendezvous::present() const {
  return [left_over = tracker_.leftOver()](const std::vector<std::string>& records) {
    return allHere(records, left_over);
  };
}

StoreThread::Acceptable Rendezvous::usable() const {
  return [left_over = tracker_.leftOver()](const std::vector<std::string>& records) {
    return allHere(records, left_over) && withoutDuplicates(records);
  };
}

std::variant<Roster, Failure> Rendezvous::lead() {
  // The size is a number that this process was given, and may be wrong. So the memory for keys and
  // records grows with the members that have come: it is for twice as many.
  auto awaited = keys_.range(0, std::min(size_, kFirstAwaited));
  const auto all_awaited = [&] { return static_cast<int>(awaited.size()) == size_; };
  const Deadline last_look = lastLook();
  OwnCheck own_check;
  for (Duration pause = StoreThread::kFirstPause;; pause = kSteadyPause) {
    // Duplicates are judged among all records: those of some ranks would never become usable.
    const auto acceptable = all_awaited() ? usable() : present();
    const auto reply = store_->awaitWhere(awaited, acceptable, last_look.orEarlier(kLongestLook),
                                          updatesOrCancelled(), Deadline::after(kLook), pause);
    if (reply.status == StoreStatus::kOk && all_awaited()) return issue(reply.values);
    if (reply.status == StoreStatus::kOk) {
      const int known = static_cast<int>(awaited.size());
      awaited = keys_.range(0, size_ - known <= known ? size_ : 2 * known);
      continue;
    }
    if (!interrupted(reply)) return failureOf(reply);
    if (auto failure = judgeUpdates()) return *failure;
    if (auto failure = scan()) return *failure;
    if (last_look.expired()) return membersMissing();
    if (!own_check.due()) continue;
    if (auto failure = own_.check()) return *failure;
    if (!own_check.patient() || !all_awaited()) continue;
    const auto contradictory = store_->getAll(awaited, deadline_, cancelled_);
    if (contradictory.status != StoreStatus::kOk) return failureOf(contradictory);
    if (!contradictory.values.empty() && allHere(contradictory.values, tracker_.leftOver()))
      return issue(contradictory.values);
  }
}

std::variant<Roster, Failure> Rendezvous::follow() {
  const std::vector<std::string> awaited{keys_.go(own_.self().token)};
  const auto anything = [](const std::vector<std::string>&) { return true; };
  const Deadline last_look = lastLook();
  OwnCheck own_check;
  for (Duration pause = StoreThread::kFirstPause;; pause = kSteadyPause) {
    const auto reply = store_->awaitWhere(awaited, anything, last_look.orEarlier(kLongestLook),
                                          updatesOrCancelled(), Deadline::after(kLook), pause);
    if (reply.status == StoreStatus::kOk) return accept(reply.values[0]);
    if (!interrupted(reply)) return failureOf(reply);
    if (auto failure = judgeUpdates()) return *failure;
    if (auto failure = scan()) return *failure;
    if (last_look.expired()) return leaderMissing();
    if (!own_check.due()) continue;
    if (auto failure = own_.check()) return *failure;
  }
}

std::variant<std::monostate, Roster, Failure> Rendezvous::refreshLeader() {
  if (auto failure = judgeUpdates()) return *failure;
  const Deadline within = deadline_.orEarlier(kRefreshWithin);
  const auto reply = lookWhileConnecting(keys_.everyone(), within);
  if (auto failure = lostForLong(reply)) return *failure;
  if (reply.status != StoreStatus::kOk) return std::monostate{};
  if (reply.values
          .empty()) {  // somebody is up already, or tries again just now, or deleted ours late
    const auto own = lookWhileConnecting({keys_.own()}, within);
    if (auto failure = lostForLong(own)) return *failure;
    if (own.status != StoreStatus::kOk) return std::monostate{};
    if (auto failure = keepOwn(own.values.empty() ? "" : own.values[0], within)) return *failure;
    return std::monostate{};
  }
  if (auto failure = keepOwn(reply.values[0], within)) return *failure;
  if (auto failure = judgeRecords(0, reply.values)) return *failure;
  bool changed = false;
  for (size_t rank = 0; rank < current_.members.size(); ++rank) {
    changed = changed || reply.values[rank] != encodeRecord(current_.members[rank]);
  }
  if (!changed || !usable()(reply.values)) return std::monostate{};
  auto issued = issue(reply.values);
  if (auto* failure = std::get_if<Failure>(&issued)) return std::move(*failure);
  return std::get<Roster>(std::move(issued));
}

std::variant<std::monostate, Roster, Failure> Rendezvous::refreshFollower() {
  if (auto failure = judgeUpdates()) return *failure;
  const Deadline within = deadline_.orEarlier(kRefreshWithin);
  const auto reply =
      lookWhileConnecting({keys_.go(own_.self().token), keys_.own(), keys_.of(0)}, within);
  if (auto failure = lostForLong(reply)) return *failure;
  if (reply.status != StoreStatus::kOk) return std::monostate{};
  if (reply.values.empty()) {  // rank 0 may have given up, and deleted its answers
    const auto each = whileConnecting([&] {
      return store_->getEach({keys_.own(), keys_.of(0)}, within, updatesOrCancelled());
    });
    if (each.status != StoreStatus::kOk) return std::monostate{};
    if (auto failure = keepOwn(each.values[0], within)) return *failure;
    if (auto failure = judgeRecords(0, {each.values[1]})) return *failure;
    return std::monostate{};
  }
  if (auto failure = keepOwn(reply.values[1], within)) return *failure;
  if (auto failure = judgeRecords(0, {reply.values[2]})) return *failure;
  const Nonce before = current_.nonce;
  auto accepted = accept(reply.values[0]);
  if (auto* failure = std::get_if<Failure>(&accepted)) return std::move(*failure);
  if (current_.nonce == before) return std::monostate{};
  return current_;
}

// The own record as it was found while connections are made.
std::optional<Failure> Rendezvous::keepOwn(const std::string& found, Deadline within) {
  if (!OwnRecord::isGone(found)) return own_.judge(found);
  return lostForLong(whileConnecting([&] { return own_.publishAgain(within); }));
}

StoreReply Rendezvous::lookWhileConnecting(const std::vector<std::string>& awaited,
                                           Deadline within) {
  return whileConnecting([&] { return store_->getAll(awaited, within, updatesOrCancelled()); });
}

// A look that is given up because the attempt has ended, a neighbour's time being up first, tells
// of the store's silence as one does that waits to its end.
StoreReply Rendezvous::whileConnecting(const std::function<StoreReply()>& look) {
  const auto began = Clock::now();
  auto reply = look();
  if (reply.status == StoreStatus::kOk) {
    store_trouble_.clear();
    lost_since_.reset();
  } else if (reply.status == StoreStatus::kLost || Clock::now() - began >= kSilentFor) {
    store_trouble_ = reply.error;
  }
  return reply;
}

// Members that have no roster yet cannot come any more: whoever waits for their connections would
// do so up to the deadline.
std::optional<Failure> Rendezvous::lostForLong(const StoreReply& reply) {
  if (reply.status != StoreStatus::kLost) return std::nullopt;
  if (!lost_since_) lost_since_ = Clock::now();
  return Clock::now() - *lost_since_ < kLostFor ? std::nullopt : std::optional(failureOf(reply));
}

std::variant<Roster, Failure> Rendezvous::issue(const std::vector<std::string>& records) {
  if (auto failure = own_.judge(records[0])) return *failure;
  if (auto failure = judgeRecords(0, records)) return *failure;
  int malformed = -1;
  Roster roster{Nonce::random(), GenerationSecret::random(), decodeAll(records, &malformed)};
  if (malformed >= 0) {
    return failureOf(FailureKind::kRendezvous,
                     "the record of rank " + std::to_string(malformed) +
                         " is malformed: all ranks must run the same version of torchft_ext");
  }
  if (const auto duplicates = findDuplicates(roster.members)) {
    return failureOf(FailureKind::kRendezvous,
                     "ranks " + std::to_string(duplicates->first) + " and " +
                         std::to_string(duplicates->second) + " are the same process (" +
                         nameProcess(roster.members[static_cast<size_t>(duplicates->first)]) + ")");
  }
  if (const auto other = findOtherPurpose(roster.members)) {
    const auto named = [&](size_t rank) {
      const MemberRecord& member = roster.members[rank];
      const std::string purpose = member.purpose.empty() ? "no named group" : member.purpose;
      return "rank " + std::to_string(rank) + " (" + nameProcess(member) + ") forms " + purpose;
    };
    return failureOf(FailureKind::kRendezvous, kOtherPurpose + named(0) + ", and " + named(*other));
  }
  std::vector<std::pair<std::string, std::string>> pairs;
  for (int rank = 1; rank < size_; ++rank) {
    const Token& token = roster.members[static_cast<size_t>(rank)].token;
    pairs.emplace_back(keys_.go(token), encodeGo(token, roster));
    issued_.insert(token);
  }
  const auto reply = store_->setAll(std::move(pairs), deadline_, cancelled_);
  if (reply.status != StoreStatus::kOk) return failureOf(reply);
  tracker_.noteRoster(roster.members);
  current_ = roster;
  return roster;
}

std::variant<Roster, Failure> Rendezvous::accept(const std::string& go) {
  auto decoded = decodeGo(go);
  if (!decoded || decoded->token != own_.self().token) {
    return failureOf(FailureKind::kRendezvous, "the roster that rank 0 sent is malformed (" +
                                                   std::to_string(go.size()) + " bytes)");
  }
  const auto& members = decoded->roster.members;
  if (members.size() != static_cast<size_t>(size_)) {
    return failureOf(FailureKind::kRendezvous,
                     "rank 0 forms a generation of " + std::to_string(members.size()) +
                         " ranks, this rank was given " + std::to_string(size_));
  }
  if (encodeRecord(members[static_cast<size_t>(rank_)]) != encodeRecord(own_.self())) {
    return failureOf(
        FailureKind::kRendezvous,
        "the roster that rank 0 sent has another process as rank " + std::to_string(rank_));
  }
  current_ = std::move(decoded->roster);
  tracker_.noteRoster(current_.members);
  return current_;
}

Failure Rendezvous::membersMissing() {
  MissingRanks missing_ranks = missing();
  std::string how = missing_ranks.nameMembers();
  if (how.empty()) how = "not all ranks came in time";
  if (!missing_ranks.answered()) how += kUnanswered;
  return failureOf(FailureKind::kTimeout, std::move(how));
}

Failure Rendezvous::leaderMissing() {
  MissingRanks missing_ranks = missing();
  std::string how = missing_ranks.nameLeader();
  if (!missing_ranks.answered()) how += kUnanswered;
  if (own_.vanished()) {
    how += " (this rank's record vanished meanwhile: does another process use rank " +
           std::to_string(rank_) + " of '" + keys_.prefix() + "' too?)";
  }
  return failureOf(FailureKind::kTimeout, std::move(how));
}

MissingRanks Rendezvous::missing() const {
  return {*store_, keys_, tracker_.leftOver(), deadline_, cancelled_};
}

Deadline Rendezvous::lastLook() const {
  if (deadline_.isNever()) return deadline_;
  const auto naming = std::min<Duration>(kNamingTime, deadline_.remaining() / kNamingShare);
  return Deadline::at(deadline_.at() - (rank_ == 0 ? naming : naming / kFollowersPart));
}

}  // namespace torchft_ext
