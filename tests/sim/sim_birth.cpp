// Communicators that are made out of others, by split and shrink, with the habits of the real ones:
// the work is the parent's, whose asyncError() drives it and tells its end; until then nobody has a
// handle; nothing but the parent's abort stops it; a failure is the parent's error, and leaves a
// handle all the same, which may be aborted once the parent is gone, and not before.
#include <algorithm>
#include <set>
#include <string>

#include "sim_communicator.h"
#include "sim_faults.h"

namespace torchft_ext::sim {
namespace {

// What is wrong with a list of ranks to be left out. Empty: nothing.
std::string whyBadList(const std::vector<int>& excluded, int own, int size) {
  if (excluded.empty()) return "an empty list";
  std::set<int> seen;
  for (const int rank : excluded) {
    if (rank < 0 || rank >= size) return "rank " + std::to_string(rank) + ", which there is not";
    if (rank == own) return "the caller itself";
    if (!seen.insert(rank).second) return "a rank twice";
  }
  return {};
}

}  // namespace

NcclResult SimCommunicator::beginBirth(const Wanted& wanted, Deliver deliver) {
  const std::string call = wanted.call;
  MutexLock lock(mutex_);
  const auto refuse = [&](const std::string& why) {
    violation(call + why);
    return NcclResult::kInvalidArgument;
  };
  if (call == "shrink") {
    const std::string why = whyBadList(wanted.excluded, rank_, size_);
    if (!why.empty()) return refuse(" was to exclude " + why);
  }
  if (barren_) return refuse(" was called again on a communicator where it has failed");
  if (!revoked_ && outstanding_ > 0) return refuse(" was called while operations are under way");
  if (wanted.color < 0 || splits_ == kMaxSplits) return NcclResult::kInvalidArgument;

  Faults& faults = Faults::instance();
  Birth birth;
  birth.deliver = std::move(deliver);
  birth.never = faults.take(FaultAction::kHang, call, rank_).has_value();
  if (const auto late = faults.take(FaultAction::kDelay, call, rank_))
    birth.not_before = Clock::now() + milliseconds(late->ms);
  if (const auto slow = faults.take(FaultAction::kInProgress, call, rank_))
    birth.polls_left = slow->polls;
  if (const auto error = faults.take(FaultAction::kAsyncError, call, rank_))
    birth.fails = static_cast<NcclResult>(error->code);

  Splitting splitting{exchange_, rank_, splits_++, wanted.color, {}};
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(wanted.excluded.begin(), wanted.excluded.end(), rank) == wanted.excluded.end())
      splitting.members.push_back(rank);
  }
  exchange_->wish(splitting.row, rank_, {wanted.color, wanted.key});
  birth.child = std::make_shared<SimCommunicator>(0, 1);
  birth.child->beOf(std::move(splitting));
  birth_ = std::move(birth);
  return NcclResult::kInProgress;
}

void SimCommunicator::beOf(Splitting splitting) {
  MutexLock lock(mutex_);  // of a child; its parent's is held
  splitting_ = std::move(splitting);
}

std::optional<NcclResult> SimCommunicator::pollBirth() {
  Birth birth;
  {
    MutexLock lock(mutex_);
    if (!birth_) return std::nullopt;
    if (birth_->polls_left != 0) {
      if (birth_->polls_left > 0) --birth_->polls_left;
      return NcclResult::kInProgress;
    }
    birth = *birth_;
  }
  if (birth.fails) {
    failBirth(*birth.fails);
    return birth.fails;
  }
  // The others may have it before a rank that is late or hangs hears so.
  const bool late = birth.never || Clock::now() < birth.not_before;
  if (!birth.child->isBorn() || late) return NcclResult::kInProgress;
  {
    MutexLock lock(mutex_);
    birth_.reset();
  }
  Faults::instance().count("births");
  birth.deliver(birth.child);
  return NcclResult::kSuccess;
}

void SimCommunicator::failBirth(NcclResult error) {
  Birth birth;
  {
    MutexLock lock(mutex_);
    if (!birth_) return;
    birth = std::move(*birth_);
    birth_.reset();
    barren_ = true;
    error_ = error;
  }
  {
    MutexLock lock(birth.child->mutex_);
    birth.child->still_of_ = weak_from_this();
    // Nobody waits for ranks that do not come; those that come do not get there.
    if (birth.child->exchange_) birth.child->exchange_->giveUp();
    birth.child->ready_ = true;  // its own state says success, as the real one's does
  }
  birth.deliver(birth.child);
}

void SimCommunicator::endBirth() {
  failBirth(NcclResult::kInternalError);
}

bool SimCommunicator::needsParentGone() const {
  std::shared_ptr<SimCommunicator> parent;
  {
    MutexLock lock(mutex_);
    parent = still_of_.lock();
  }
  return parent && !parent->freed();  // a parent is locked before its child, never the other way
}

bool SimCommunicator::freed() const {
  MutexLock lock(mutex_);
  return freed_;
}

bool SimCommunicator::isBorn() {
  MutexLock lock(mutex_);
  if (!ready_) becomeReady();
  return ready_;
}

// True: this rank's part is known and joined.
bool SimCommunicator::progressSplit() {
  std::vector<std::pair<int, int>> part;  // key, rank of the parent
  for (int member : splitting_->members) {
    const auto wish = splitting_->parent->wishOf(splitting_->row, member);
    if (!wish) return false;
    if (wish->color == splitting_->color) part.emplace_back(wish->key, member);
  }
  std::sort(part.begin(), part.end());
  const int leader = part.front().second;
  size_ = static_cast<int>(part.size());
  for (int i = 0; i < size_; ++i) {
    if (part[static_cast<size_t>(i)].second == splitting_->parent_rank) rank_ = i;
  }
  auto id = splitting_->parent->published(splitting_->row, leader);
  if (!id && leader == splitting_->parent_rank) {
    id.emplace();
    if (!Exchange::create(&*id)) return false;
    splitting_->parent->publish(splitting_->row, leader, *id);
  }
  if (!id) return false;
  exchange_ = Exchange::open(*id);
  if (!exchange_) return false;  // its leader has given up: this rank's part is never done
  exchange_->join(rank_, size_);
  splitting_.reset();
  return true;
}

}  // namespace torchft_ext::sim
