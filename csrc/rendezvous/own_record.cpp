#include "rendezvous/own_record.h"

#include <algorithm>
#include <utility>

#include "rendezvous/rendezvous_failure.h"

namespace torchft_ext {
namespace {

// How long a withdrawal stands at least. Rank 0 of 1024 needs 2 s to see every record once.
constexpr milliseconds kToldWithin{3000};

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
  published_ = true;  // maybe, even if the call fails
  const auto reply = store_->set(keys_.own(), encodeRecord(self_), deadline_, cancelled_);
  if (reply.status != StoreStatus::kOk) return failureOf(reply);
  return std::nullopt;
}

std::optional<Failure> OwnRecord::publishAgain() {
  vanished_ = true;
  return publish();
}

std::optional<Failure> OwnRecord::check() {
  const auto reply = store_->getAll({keys_.own()}, deadline_, cancelled_);
  if (reply.status != StoreStatus::kOk) return failureOf(reply);
  return reply.values.empty() ? publishAgain() : judge(reply.values[0]);
}

std::optional<Failure> OwnRecord::judge(const std::string& bytes) {
  if (bytes == encodeRecord(self_)) return std::nullopt;
  if (decodeWithdrawal(bytes)) return publishAgain();  // of an earlier attempt, late
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

void OwnRecord::withdraw(const Ending& ending) {
  if (!published_ || usurped_) return;
  const Withdrawal withdrawal{self_, ending, {}};
  writeWithdrawal(withdrawal);
  addressWithdrawal(withdrawal);
  withdrawn_ = Clock::now();
}

void OwnRecord::decline(const Ending& ending) {
  published_ = true;  // what is written in the record's place has to go again
  const Withdrawal withdrawal{self_, ending, {}};
  writeWithdrawal(withdrawal);
  store_->awaitAll(keys_.readers(), deadline_, cancelled_);
  addressWithdrawal(withdrawal);
  withdrawn_ = Clock::now();
}

void OwnRecord::writeWithdrawal(const Withdrawal& withdrawal) {
  store_->editLater(keys_.own(), [own = encodeRecord(self_), words = encodeWithdrawal(withdrawal)](
                                     const std::string& found, const auto&) {
    // Nothing: the attempt ended before its record was written. They may be waiting for it.
    return found == own || found.empty() ? std::optional(words) : std::nullopt;
  });
}

void OwnRecord::addressWithdrawal(const Withdrawal& withdrawal) {
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
  store_->editLater(keys_.own(), address, keys_.readers());
}

void OwnRecord::remove(bool at_once) {
  if (!std::exchange(published_, false) || usurped_) return;
  auto removed = [token = self_.token](const std::string& found, const auto&) {
    const auto withdrawal = decodeWithdrawal(found);
    const auto record = withdrawal ? withdrawal->member : decodeRecord(found);
    return record && record->token == token ? std::optional(std::string()) : std::nullopt;
  };
  const Duration stands =
      withdrawn_ && !at_once ? *withdrawn_ + kToldWithin - Clock::now() : Duration::zero();
  store_->editLater(keys_.own(), std::move(removed), {}, std::max(stands, Duration::zero()));
}

}  // namespace torchft_ext
