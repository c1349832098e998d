#include "membership/own_record.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "membership/rendezvous_failure.h"

namespace torchft_ext {
namespace {

// How long a failure record stands at least. Rank 0 of 1024 needs 2 s to see every record once.
constexpr milliseconds kToldWithin{3000};
// Between two looks at who has read it; how many at once, since other requests wait meanwhile.
constexpr milliseconds kLook{10};
constexpr milliseconds kCancelInterval{2};
constexpr size_t kLooksAtOnce = 32;

// False: there is no time left, or the caller gives up.
bool pause(Deadline until, const Cancelled& cancelled) {
  const Deadline next = until.orEarlier(kLook);
  while (!next.expired()) {
    if (cancelled && cancelled()) return false;
    std::this_thread::sleep_for(kCancelInterval);
  }
  return !until.expired();
}

// A passed-on ending keeps where it began; that of a member which had not come has no origin.
bool isSame(const Ending& one, const Ending& other) {
  return one.origin == other.origin && (!one.origin.isZero() || one.culprit == other.culprit);
}

}  // namespace

OwnRecord::OwnRecord(std::shared_ptr<StoreThread> store, AttemptKeys keys, int rank,
                     MemberRecord self, Deadline deadline, Cancelled cancelled)
    : store_(std::move(store)),
      keys_(std::move(keys)),
      rank_(rank),
      self_(std::move(self)),
      deadline_(deadline),
      cancelled_(std::move(cancelled)) {}

std::optional<Failure> OwnRecord::publish() {
  const auto reply = write(deadline_);
  if (reply.status != StoreStatus::kOk) return failureOf(reply);
  return std::nullopt;
}

StoreReply OwnRecord::publishAgain(Deadline deadline) {
  vanished_ = true;
  return write(deadline);
}

StoreReply OwnRecord::write(Deadline deadline) {
  published_ = true;  // maybe, even if the call fails
  return store_->set(keys_.own(), encodeRecord(self_), deadline, cancelled_);
}

std::optional<Failure> OwnRecord::check() {
  const auto reply = store_->getAll({keys_.own()}, deadline_, cancelled_);
  if (reply.status != StoreStatus::kOk) return failureOf(reply);
  const std::string found = reply.values.empty() ? "" : reply.values[0];
  if (!isGone(found)) return judge(found);
  const auto again = publishAgain(deadline_);
  return again.status == StoreStatus::kOk ? std::nullopt : std::optional(failureOf(again));
}

bool OwnRecord::isGone(const std::string& bytes) {
  return bytes.empty() || decodeFailureRecord(bytes);  // of an earlier attempt, late
}

std::optional<Failure> OwnRecord::judge(const std::string& bytes) {
  if (bytes == encodeRecord(self_)) return std::nullopt;
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
                     "this process entered '" + keys_.prefix() + "' again as rank " + rank);
  }
  Failure failure =
      failureOf(FailureKind::kRendezvous, "duplicate rank " + rank + ": another process (" +
                                              nameProcess(*other) + ") uses this rank");
  failure.cause.rank = rank_;
  failure.cause.host = other->host;
  failure.cause.pid = other->pid;
  return failure;
}

void OwnRecord::publishFailure(const Ending& ending) {
  if (!published_ || usurped_) return;
  noteFailureRecord(ending);
  store_->editLater(keys_.own(),
                    [own = encodeRecord(self_), words = encodeFailureRecord(*failure_record_)](
                        const std::string& found, const auto&) {
                      // Nothing: the attempt ended before its record was written. They may be
                      // waiting for it.
                      return found == own || found.empty() ? std::optional(words) : std::nullopt;
                    });
  addressFailureRecord();
}

// Behind the caller's back first: if the wait that follows is interrupted, it is done all the same.
void OwnRecord::publishFailedInit(const Ending& ending) {
  published_ = true;  // what is written in the record's place has to go again
  noteFailureRecord(ending);
  store_->editLater(keys_.own(), [words = encodeFailureRecord(*failure_record_)](
                                     const auto&, const auto&) { return std::optional(words); });
  addressFailureRecord();
}

void OwnRecord::noteFailureRecord(const Ending& ending) {
  failure_record_ = FailureRecord{self_, ending, {}};
  failure_written_ = Clock::now();
}

void OwnRecord::addressFailureRecord() {
  const auto address = [failure_record = *failure_record_](
                           const std::string& found, const std::vector<std::string>& readers) {
    FailureRecord addressed = failure_record;
    for (const std::string& reader : readers) {
      if (const auto record = decodeRecord(reader)) addressed.meant_for.push_back(record->token);
    }
    const bool stands = found == encodeFailureRecord(failure_record);
    return stands && !addressed.meant_for.empty() ? std::optional(encodeFailureRecord(addressed))
                                                  : std::nullopt;
  };
  store_->editLater(keys_.own(), address, keys_.readers());
}

void OwnRecord::awaitReaders(std::vector<std::string> readers, Deadline until,
                             const Cancelled& cancelled) {
  if (!failure_record_ || usurped_) return;
  while (!readers.empty() && tell(readers, until, cancelled) && pause(until, cancelled)) {
  }
}

// One look at each: lets go of those who have read it, and addresses it to those who are new.
// False: there is no more to be done.
bool OwnRecord::tell(std::vector<std::string>& readers, Deadline until,
                     const Cancelled& cancelled) {
  const size_t known = failure_record_->meant_for.size();
  std::vector<std::string> left;
  for (size_t first = 0; first < readers.size(); first += kLooksAtOnce) {
    const auto begin = readers.begin() + static_cast<std::ptrdiff_t>(first);
    const size_t count = std::min(kLooksAtOnce, readers.size() - first);
    const std::vector<std::string> some(begin, begin + static_cast<std::ptrdiff_t>(count));
    const auto reply = store_->getEach(some, until, cancelled);
    if (reply.status != StoreStatus::kOk) return false;
    for (size_t i = 0; i < count; ++i) {
      if (!hasRead(reply.values[i])) left.push_back(some[i]);
    }
  }
  readers = std::move(left);
  const auto stands = failureRecordStands(until, cancelled);
  if (!stands) return false;
  if (*stands && failure_record_->meant_for.size() == known) return true;
  failure_written_ = Clock::now();
  return store_->set(keys_.own(), encodeFailureRecord(*failure_record_), until, cancelled).status ==
         StoreStatus::kOk;
}

// nullopt: there is no answer, or another record has taken its place.
std::optional<bool> OwnRecord::failureRecordStands(Deadline until, const Cancelled& cancelled) {
  const auto reply = store_->getEach({keys_.own()}, until, cancelled);
  if (reply.status != StoreStatus::kOk) return std::nullopt;
  const std::string& found = reply.values[0];
  const auto failure_record = decodeFailureRecord(found);
  const auto record = failure_record ? failure_record->member : decodeRecord(found);
  usurped_ = !found.empty() && !(record && record->token == self_.token);
  return usurped_ ? std::nullopt : std::optional(failure_record.has_value());
}

// It has ended too. A record that is new is addressed from now on.
bool OwnRecord::hasRead(const std::string& found) {
  auto& meant_for = failure_record_->meant_for;
  const auto meant = [&](const MemberRecord& member) {
    return std::find(meant_for.begin(), meant_for.end(), member.token) != meant_for.end();
  };
  if (const auto theirs = decodeFailureRecord(found))
    return isSame(theirs->ending, failure_record_->ending) || meant(theirs->member);
  const auto record = decodeRecord(found);
  if (record && !meant(*record)) meant_for.push_back(record->token);
  return false;
}

void OwnRecord::remove(bool at_once) {
  if (!std::exchange(published_, false) || usurped_) return;
  auto removed = [token = self_.token](const std::string& found, const auto&) {
    const auto failure_record = decodeFailureRecord(found);
    const auto record = failure_record ? failure_record->member : decodeRecord(found);
    return record && record->token == token ? std::optional(std::string()) : std::nullopt;
  };
  const Duration stands = failure_record_ && !at_once
                              ? failure_written_ + kToldWithin - Clock::now()
                              : Duration::zero();
  store_->editLater(keys_.own(), std::move(removed), {}, std::max(stands, Duration::zero()));
}

}  // namespace torchft_ext
