#include "membership/missing_ranks.h"

#include "membership/records.h"
#include "membership/rendezvous_failure.h"

namespace torchft_ext {
namespace {

constexpr size_t kMostMissingNamed = 8;
// Worlds in which everyone may ask the store for everyone.
constexpr int kMostAskedByAll = 64;
// How many are asked for at first.
constexpr int kFirstAsked = 64;

std::string nameRanks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

std::string MissingRanks::nameMembers(int but) {
  std::vector<int> missing;
  // As far as members have come, and as many again: a size may be wrong, and is no reason to ask,
  // and to hold memory, for so many.
  for (int first = 1, count = kFirstAsked; first < keys_.size() && missing.empty() && answered_;) {
    const int last = keys_.size() - first <= count ? keys_.size() : first + count;
    find(first, last, missing);
    first = last;
    if (count < keys_.size() / 2) count *= 2;
  }
  if (missing.empty()) {
    const auto reply = store_.getAll(keys_.everyone(), deadline_, cancelled_);
    answered_ = answered_ && reply.status == StoreStatus::kOk;
    return nameLeftOver(reply.values, but);
  }
  std::string how = nameRanks(missing) + " did not come";
  if (missing.size() == kMostMissingNamed) how += " (and maybe others)";
  return how;
}

std::string MissingRanks::nameLeader() {
  const auto reply = store_.getAll(keys_.range(0, 1), deadline_, cancelled_);
  if (reply.status == StoreStatus::kOk && reply.values.empty()) return "rank 0 did not come";
  std::string how = nameLeftOver(reply.values);
  if (!how.empty()) return how;
  answered_ = reply.status == StoreStatus::kOk;
  how = "rank 0 sent no roster";
  const bool small = keys_.size() <= kMostAskedByAll;
  const std::string others = answered_ && small ? nameMembers() : std::string();
  if (!others.empty()) return how + ": " + others;
  return answered_ ? how + ": other ranks may not have come to it" : how;
}

// The first record that does not count. Empty: all do.
std::string MissingRanks::nameLeftOver(const std::vector<std::string>& records, int but) const {
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (static_cast<int>(rank) == but) continue;
    const std::string who = "rank " + std::to_string(rank) + " did not come: ";
    if (const auto failure_record = decodeFailureRecord(records[rank])) {
      const std::string& why = failure_record->ending.failure.cause.how;
      return who + "an earlier attempt of its process (" + nameProcess(failure_record->member) +
             ") failed, and it has not tried again" + (why.empty() ? "" : ": " + why);
    }
    const auto record = decodeRecord(records[rank]);
    if (record && left_over_.count(record->incarnation) > 0) {
      return who + "its record is an earlier one, of a process that does not answer (" +
             nameProcess(*record) + ")";
    }
  }
  return {};
}

void MissingRanks::find(int first, int last, std::vector<int>& missing) {
  if (first == last || missing.size() >= kMostMissingNamed) return;
  const auto reply = store_.getAll(keys_.range(first, last), deadline_, cancelled_);
  answered_ = answered_ && reply.status == StoreStatus::kOk;
  if (reply.status != StoreStatus::kOk || !reply.values.empty()) return;
  if (last - first == 1) {
    if (keys_.of(first) != keys_.own()) missing.push_back(first);
    return;
  }
  const int middle = first + (last - first) / 2;
  find(first, middle, missing);
  find(middle, last, missing);
}

}  // namespace torchft_ext
