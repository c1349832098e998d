#include "rendezvous/rendezvous.h"

#include <algorithm>
#include <map>
#include <utility>

namespace torchft_ext {
namespace {

// How often a waiting member makes sure of its own record: at first, and at most. Also how long
// rank 0 bears with records that contradict each other (they may be left over from an earlier
// attempt).
constexpr milliseconds kFirstOwnCheck{10};
constexpr milliseconds kOwnCheck{1000};
// How often a waiting member looks at what others have put in the store, and between such looks at
// what it waits for; and at how many records in one go.
constexpr milliseconds kLook{15};
constexpr milliseconds kSteadyPause{5};
constexpr int kCensus = 8;
// How long a withdrawal stands at least. Rank 0 of 1024 needs 2 s to see every record once.
constexpr milliseconds kToldWithin{3000};
// Kept back for finding out who is missing; a fifth of a short timeout.
constexpr milliseconds kNamingTime{500};
constexpr size_t kMostMissingNamed = 8;
// While links are made: how long one look may take (the links may be up meanwhile), and how long a
// store may be lost that some members may still need.
constexpr milliseconds kRefreshWithin{1000};
constexpr milliseconds kSilentFor{100};  // a look that ends earlier without an answer tells nothing
constexpr milliseconds kLostFor{2000};

Failure failureOf(FailureKind kind, std::string how) {
  Failure failure;
  failure.kind = kind;
  failure.cause.how = std::move(how);
  return failure;
}

std::string nameRanks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string nameProcess(const MemberRecord& record) {
  return "host " + record.host + ", pid " + std::to_string(record.pid);
}

// The first two ranks that have the same incarnation.
std::optional<std::pair<int, int>> findTwins(const std::vector<MemberRecord>& members) {
  std::map<Incarnation, int> seen;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const auto [entry, fresh] = seen.emplace(members[rank].incarnation, static_cast<int>(rank));
    if (!fresh) return std::pair(entry->second, static_cast<int>(rank));
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
bool withoutTwins(const std::vector<std::string>& records) {
  int malformed = -1;
  return !findTwins(decodeAll(records, &malformed));
}

bool allHere(const std::vector<std::string>& records, const std::set<Incarnation>& left_over) {
  return std::none_of(records.begin(), records.end(), [&](const std::string& bytes) {
    if (decodeWithdrawal(bytes)) return true;
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
                       AttemptMemory memory, std::unique_ptr<Vigil> vigil)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      rank_(rank),
      size_(size),
      self_(std::move(self)),
      deadline_(deadline),
      cancelled_(std::move(cancelled)),
      attendance_(rank, size, self_, std::move(memory), std::move(vigil)) {}

Rendezvous::~Rendezvous() {
  const Duration after = withdrawn_ ? *withdrawn_ + kToldWithin - Clock::now() : Duration::zero();
  remove(std::max(after, Duration::zero()));
}

AttemptMemory Rendezvous::formed() {
  return attendance_.formed(current_.members);
}

AttemptMemory Rendezvous::withdraw(const Failure& why) {
  const Ending ending = attendance_.endingOf(why);
  if (published_ && !usurped_) {
    tellOthers(ending);
    withdrawn_ = Clock::now();
  }
  return attendance_.failed(ending);
}

void Rendezvous::decline(const Failure& why) {
  published_ = true;  // what is written in the record's place has to go again
  const Withdrawal withdrawal{self_, attendance_.endingOf(why), {}};
  writeWithdrawal(withdrawal);
  store_->awaitAll(readers(), deadline_, cancelled_);
  addressWithdrawal(withdrawal);
  withdrawn_ = Clock::now();
}

void Rendezvous::tellOthers(const Ending& ending) {
  const Withdrawal withdrawal{self_, ending, {}};
  writeWithdrawal(withdrawal);
  addressWithdrawal(withdrawal);
}

void Rendezvous::writeWithdrawal(const Withdrawal& withdrawal) {
  store_->editLater(key(rank_), [own = encodeRecord(self_), words = encodeWithdrawal(withdrawal)](
                                    const std::string& found, const auto&) {
    // Nothing: the attempt ended before its record was written. They may be waiting for it.
    return found == own || found.empty() ? std::optional(words) : std::nullopt;
  });
}

void Rendezvous::addressWithdrawal(const Withdrawal& withdrawal) {
  const auto address = [withdrawal](const std::string& found,
                                    const std::vector<std::string>& readers) {
    Withdrawal addressed = withdrawal;
    for (const std::string& reader : readers) {
      if (const auto record = decodeRecord(reader)) addressed.meant_for.push_back(record->token);
    }
    const bool stands = found == encodeWithdrawal(withdrawal);
    return stands && !addressed.meant_for.empty() ? std::optional(encodeWithdrawal(addressed))
                                                  : std::nullopt;
  };
  store_->editLater(key(rank_), address, readers());
}

std::vector<std::string> Rendezvous::readers() const {
  return rank_ == 0 ? keys(1, size_) : keys(0, 1);
}

void Rendezvous::succeeded() {
  remove(Duration::zero());
}

void Rendezvous::remove(Duration after) {
  if (published_ && !usurped_) {
    auto removed = [token = self_.token](const std::string& found, const auto&) {
      const auto withdrawal = decodeWithdrawal(found);
      const auto record = withdrawal ? withdrawal->member : decodeRecord(found);
      return record && record->token == token ? std::optional(std::string()) : std::nullopt;
    };
    store_->editLater(key(rank_), std::move(removed), {}, after);
  }
  std::vector<std::string> rubbish;
  rubbish.reserve(issued_.size());
  for (const Token& token : issued_) rubbish.push_back(goKey(token));
  published_ = false;
  issued_.clear();
  store_->removeLater(std::move(rubbish));
}

std::variant<Roster, Failure> Rendezvous::enter() {
  if (auto failure = publish()) return *failure;
  if (size_ == 1) {
    // A set alone does not wait for the server: without an answer a lost store would go unnoticed.
    if (auto failure = checkOwnRecord()) return *failure;
    return issue({encodeRecord(self_)});
  }
  return rank_ == 0 ? lead() : follow();
}

std::variant<std::monostate, Roster, Failure> Rendezvous::refresh() {
  return rank_ == 0 ? refreshLeader() : refreshFollower();
}

std::optional<Failure> Rendezvous::publish() {
  published_ = true;  // maybe, even if the call fails
  const auto reply = store_->set(key(rank_), encodeRecord(self_), deadline_, cancelled_);
  if (reply.status != StoreStatus::kOk) return failed(reply);
  return std::nullopt;
}

std::optional<Failure> Rendezvous::checkOwnRecord() {
  const auto reply = store_->getAll({key(rank_)}, deadline_, cancelled_);
  if (reply.status != StoreStatus::kOk) return failed(reply);
  if (reply.values.empty()) {
    vanished_ = true;
    return publish();
  }
  return judgeOwnRecord(reply.values[0]);
}

std::optional<Failure> Rendezvous::judgeOwnRecord(const std::string& bytes) {
  if (bytes == encodeRecord(self_)) return std::nullopt;
  if (decodeWithdrawal(bytes)) {  // of an earlier attempt, late
    vanished_ = true;
    return publish();
  }
  usurped_ = true;
  const std::string rank = std::to_string(rank_);
  const auto other = decodeRecord(bytes);
  if (!other) {
    return failureOf(FailureKind::kRendezvous,
                     "the record of rank " + rank + " was overwritten with " +
                         std::to_string(bytes.size()) + " bytes of another kind");
  }
  if (other->incarnation == self_.incarnation) {
    return failureOf(FailureKind::kRendezvous,
                     "this process entered '" + prefix_ + "' again as rank " + rank);
  }
  Failure failure =
      failureOf(FailureKind::kRendezvous, "duplicate rank " + rank + ": another process (" +
                                              nameProcess(*other) + ") uses this rank");
  failure.cause.rank = rank_;
  failure.cause.host = other->host;
  failure.cause.pid = other->pid;
  return failure;
}

// Who else has come, and who has gone.

Cancelled Rendezvous::newsOrCancelled() {
  return [this] {
    gave_up_ = gave_up_ || (cancelled_ && cancelled_());
    return gave_up_ || attendance_.hasNews();
  };
}

// Nothing is wrong: the wait was over, or there is news to judge.
bool Rendezvous::interrupted(const StoreReply& reply) {
  return reply.status == StoreStatus::kTimedOut ||
         (reply.status == StoreStatus::kCancelled && !gave_up_);
}

std::optional<Failure> Rendezvous::judgeNews() {
  auto ending = attendance_.judgeNews();
  return ending ? std::optional(std::move(ending->failure)) : std::nullopt;
}

// Empty ones are of ranks that have not come.
std::optional<Failure> Rendezvous::judgeRecords(int first,
                                                const std::vector<std::string>& records) {
  for (size_t i = 0; i < records.size(); ++i) {
    auto ending = attendance_.judgeRecord(first + static_cast<int>(i), records[i]);
    if (!ending) continue;
    Failure& failure = ending->failure;
    if (rank_ == 0 && failure.kind == FailureKind::kTimeout) {
      if (const std::string missing = nameMissing(); !missing.empty())
        failure.cause.how += "; " + missing;
    }
    return std::move(failure);
  }
  return std::nullopt;
}

// A few of the others' records at a time.
std::optional<Failure> Rendezvous::census() {
  const int first = rank_ == 0 ? next_in_census_ : 0;
  const int last = rank_ == 0 ? std::min(size_, first + kCensus) : 1;
  const auto reply = store_->getEach(keys(first, last), deadline_, newsOrCancelled());
  if (reply.status == StoreStatus::kCancelled && !gave_up_) return std::nullopt;
  if (reply.status != StoreStatus::kOk) return failed(reply);
  next_in_census_ = last == size_ ? 1 : last;
  return judgeRecords(first, reply.values);
}

StoreThread::Acceptable Rendezvous::usable() const {
  return [left_over = attendance_.leftOver()](const std::vector<std::string>& records) {
    return allHere(records, left_over) && withoutTwins(records);
  };
}

std::variant<Roster, Failure> Rendezvous::lead() {
  const auto everyone = keys(0, size_);
  const Deadline last_look = lastLook();
  OwnCheck own_check;
  for (Duration pause = StoreThread::kFirstPause;; pause = kSteadyPause) {
    const auto reply = store_->awaitWhere(everyone, usable(), last_look.orEarlier(kLook),
                                          newsOrCancelled(), pause);
    if (reply.status == StoreStatus::kOk) return issue(reply.values);
    if (!interrupted(reply)) return failed(reply);
    if (auto failure = judgeNews()) return *failure;
    if (last_look.expired()) return membersMissing();
    if (auto failure = census()) return *failure;
    if (!own_check.due()) continue;
    if (auto failure = checkOwnRecord()) return *failure;
    if (!own_check.patient()) continue;
    const auto contradictory = store_->getAll(everyone, deadline_, cancelled_);
    if (contradictory.status != StoreStatus::kOk) return failed(contradictory);
    if (!contradictory.values.empty() && allHere(contradictory.values, attendance_.leftOver()))
      return issue(contradictory.values);
  }
}

std::variant<Roster, Failure> Rendezvous::follow() {
  const std::vector<std::string> awaited{goKey(self_.token), key(rank_)};
  const auto anything = [](const std::vector<std::string>&) { return true; };
  const Deadline last_look = lastLook();
  OwnCheck own_check;
  for (Duration pause = StoreThread::kFirstPause;; pause = kSteadyPause) {
    const auto reply =
        store_->awaitWhere(awaited, anything, last_look.orEarlier(kLook), newsOrCancelled(), pause);
    if (reply.status == StoreStatus::kOk) return accept(reply.values[0]);
    if (!interrupted(reply)) return failed(reply);
    if (auto failure = judgeNews()) return *failure;
    if (auto failure = census()) return *failure;
    if (last_look.expired()) return leaderMissing();
    if (!own_check.due()) continue;
    if (auto failure = checkOwnRecord()) return *failure;
  }
}

std::variant<std::monostate, Roster, Failure> Rendezvous::refreshLeader() {
  if (auto failure = judgeNews()) return *failure;
  const auto reply = lookWhileLinking(keys(0, size_));
  if (auto failure = lostForLong(reply)) return *failure;
  if (reply.status != StoreStatus::kOk) return std::monostate{};
  if (reply.values
          .empty()) {  // somebody is up already, or tries again just now, or deleted ours late
    const auto own = lookWhileLinking({key(rank_)});
    if (auto failure = lostForLong(own)) return *failure;
    if (own.status != StoreStatus::kOk) return std::monostate{};
    vanished_ = vanished_ || own.values.empty();
    auto failure = own.values.empty() ? publish() : judgeOwnRecord(own.values[0]);
    if (failure) return *failure;
    return std::monostate{};
  }
  if (auto failure = judgeOwnRecord(reply.values[0])) return *failure;
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
  if (auto failure = judgeNews()) return *failure;
  const auto reply = lookWhileLinking({goKey(self_.token), key(rank_), key(0)});
  if (auto failure = lostForLong(reply)) return *failure;
  if (reply.status != StoreStatus::kOk) return std::monostate{};
  if (reply.values.empty()) {  // rank 0 may have given up, and deleted its answers
    const auto leader =
        store_->getEach({key(0)}, deadline_.orEarlier(kRefreshWithin), newsOrCancelled());
    if (leader.status != StoreStatus::kOk) return std::monostate{};
    if (auto failure = judgeRecords(0, leader.values)) return *failure;
    return std::monostate{};
  }
  if (auto failure = judgeOwnRecord(reply.values[1])) return *failure;
  if (auto failure = judgeRecords(0, {reply.values[2]})) return *failure;
  const Nonce before = current_.nonce;
  auto accepted = accept(reply.values[0]);
  if (auto* failure = std::get_if<Failure>(&accepted)) return std::move(*failure);
  if (current_.nonce == before) return std::monostate{};
  return current_;
}

StoreReply Rendezvous::lookWhileLinking(const std::vector<std::string>& awaited) {
  const auto began = Clock::now();
  auto reply = store_->getAll(awaited, deadline_.orEarlier(kRefreshWithin), newsOrCancelled());
  if (reply.status == StoreStatus::kOk) {
    store_trouble_.clear();
    lost_since_.reset();
  } else if (reply.status == StoreStatus::kLost ||
             (reply.status == StoreStatus::kTimedOut && Clock::now() - began >= kSilentFor)) {
    store_trouble_ = reply.error;
  }
  return reply;
}

// Members that have no roster yet cannot come any more: whoever waits for their links would do so
// up to the deadline.
std::optional<Failure> Rendezvous::lostForLong(const StoreReply& reply) {
  if (reply.status != StoreStatus::kLost) return std::nullopt;
  if (!lost_since_) lost_since_ = Clock::now();
  return Clock::now() - *lost_since_ < kLostFor ? std::nullopt : std::optional(failed(reply));
}

std::variant<Roster, Failure> Rendezvous::issue(const std::vector<std::string>& records) {
  if (auto failure = judgeOwnRecord(records[0])) return *failure;
  if (auto failure = judgeRecords(0, records)) return *failure;
  int malformed = -1;
  Roster roster{Nonce::random(), EpochSecret::random(), decodeAll(records, &malformed)};
  if (malformed >= 0) {
    return failureOf(FailureKind::kRendezvous,
                     "the record of rank " + std::to_string(malformed) +
                         " is malformed: all ranks must run the same version of torchft_ext");
  }
  if (const auto twins = findTwins(roster.members)) {
    return failureOf(FailureKind::kRendezvous,
                     "ranks " + std::to_string(twins->first) + " and " +
                         std::to_string(twins->second) + " are the same process (" +
                         nameProcess(roster.members[static_cast<size_t>(twins->first)]) + ")");
  }
  std::vector<std::pair<std::string, std::string>> pairs;
  for (int rank = 1; rank < size_; ++rank) {
    const Token& token = roster.members[static_cast<size_t>(rank)].token;
    pairs.emplace_back(goKey(token), encodeGo(token, roster));
    issued_.insert(token);
  }
  const auto reply = store_->setAll(std::move(pairs), deadline_, cancelled_);
  if (reply.status != StoreStatus::kOk) return failed(reply);
  attendance_.noteRoster(roster.members);
  current_ = roster;
  return roster;
}

std::variant<Roster, Failure> Rendezvous::accept(const std::string& go) {
  auto decoded = decodeGo(go);
  if (!decoded || decoded->token != self_.token) {
    return failureOf(FailureKind::kRendezvous, "the roster that rank 0 sent is malformed (" +
                                                   std::to_string(go.size()) + " bytes)");
  }
  const auto& members = decoded->roster.members;
  if (members.size() != static_cast<size_t>(size_)) {
    return failureOf(FailureKind::kRendezvous,
                     "rank 0 forms an epoch of " + std::to_string(members.size()) +
                         " ranks, this rank was given " + std::to_string(size_));
  }
  if (encodeRecord(members[static_cast<size_t>(rank_)]) != encodeRecord(self_)) {
    return failureOf(
        FailureKind::kRendezvous,
        "the roster that rank 0 sent has another process as rank " + std::to_string(rank_));
  }
  current_ = std::move(decoded->roster);
  attendance_.noteRoster(current_.members);
  return current_;
}

Failure Rendezvous::membersMissing() {
  std::string how = nameMissing();
  if (how.empty()) how = "not all ranks came in time";
  return failureOf(FailureKind::kTimeout, std::move(how));
}

// Empty: nobody is missing, as far as can be seen.
std::string Rendezvous::nameMissing() {
  std::vector<int> missing;
  findMissing(1, size_, missing);
  if (missing.empty()) {
    const auto reply = store_->getAll(keys(0, size_), deadline_, cancelled_);
    return nameLeftOver(reply.values);
  }
  std::string how = nameRanks(missing) + " did not come";
  if (missing.size() == kMostMissingNamed) how += " (and maybe others)";
  return how;
}

// The first record that does not count. Empty: all do.
std::string Rendezvous::nameLeftOver(const std::vector<std::string>& records) const {
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const std::string who = "rank " + std::to_string(rank) + " did not come: ";
    if (const auto withdrawal = decodeWithdrawal(records[rank])) {
      return who + "an earlier attempt of its process (" + nameProcess(withdrawal->member) +
             ") failed, and it has not tried again";
    }
    const auto record = decodeRecord(records[rank]);
    if (record && attendance_.leftOver().count(record->incarnation) > 0) {
      return who + "its record is an earlier one, of a process that does not answer (" +
             nameProcess(*record) + ")";
    }
  }
  return {};
}

Failure Rendezvous::leaderMissing() {
  const auto reply = store_->getAll({key(0)}, deadline_, cancelled_);
  std::string how = "rank 0 sent no roster: other ranks may not have come to it";
  if (reply.status == StoreStatus::kOk && reply.values.empty()) how = "rank 0 did not come";
  if (const std::string left = nameLeftOver(reply.values); !left.empty()) how = left;
  if (vanished_) {
    how += " (this rank's record vanished meanwhile: does another process use rank " +
           std::to_string(rank_) + " of '" + prefix_ + "' too?)";
  }
  return failureOf(FailureKind::kTimeout, std::move(how));
}

void Rendezvous::findMissing(int first, int last, std::vector<int>& missing) {
  if (first == last || missing.size() >= kMostMissingNamed) return;
  const auto reply = store_->getAll(keys(first, last), deadline_, cancelled_);
  if (reply.status != StoreStatus::kOk || !reply.values.empty()) return;
  if (last - first == 1) {
    missing.push_back(first);
    return;
  }
  const int middle = first + (last - first) / 2;
  findMissing(first, middle, missing);
  findMissing(middle, last, missing);
}

Failure Rendezvous::failed(const StoreReply& reply) const {
  switch (reply.status) {
    case StoreStatus::kCancelled:
      return failureOf(FailureKind::kAborted, "the attempt was cancelled");
    case StoreStatus::kTimedOut:
      return failureOf(FailureKind::kTimeout, reply.error);
    case StoreStatus::kLost:
      return failureOf(FailureKind::kStoreLost, reply.error);
    case StoreStatus::kOk:
      break;
  }
  return failureOf(FailureKind::kInternal, "a store call failed without a reason");
}

Deadline Rendezvous::lastLook() const {
  if (deadline_.isNever()) return deadline_;
  return Deadline::at(deadline_.at() - std::min<Duration>(kNamingTime, deadline_.remaining() / 5));
}

std::string Rendezvous::key(int rank) const {
  return prefix_ + "/" + std::to_string(rank);
}
std::string Rendezvous::goKey(const Token& token) const {
  return prefix_ + "/go/" + token.hex();
}

std::vector<std::string> Rendezvous::keys(int first, int last) const {
  std::vector<std::string> all;
  for (int rank = first; rank < last; ++rank) all.push_back(key(rank));
  return all;
}

}  // namespace torchft_ext
