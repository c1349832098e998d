// Groups made of the current epoch's members: split() and shrink().
#include <algorithm>
#include <utility>

#include "c10d/comm_error.h"
#include "c10d/ft_backend.h"
#include "c10d/subgroups.h"

namespace torchft_ext {
namespace {

// Flags of torch.distributed.shrink_group().
constexpr int kShrinkDefault = 0;
constexpr int kShrinkAbort = 1;

constexpr Duration kGrace = std::chrono::seconds(1);

std::string below(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "/" + name;
}

}  // namespace

// torch hands over the parent's own object, or a copy of it, or a plain one: never changed here.
c10::intrusive_ptr<FtOptions> FtBackend::optionsOfChild(
    const c10::intrusive_ptr<c10d::Backend::Options>& given) const {
  auto* own = dynamic_cast<FtOptions*>(given.get());
  auto options = own != nullptr ? c10::make_intrusive<FtOptions>(*own) : optionsNow();
  if (given) options->timeout = given->timeout;
  return options;
}

c10::intrusive_ptr<c10d::Backend> FtBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  return splitOff(store, ranks, options, false);
}

c10::intrusive_ptr<FtBackend> FtBackend::splitOff(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options, bool may_resize) {
  const Place place = enter();
  const std::vector<int> members = checkedMembers("split: ranks", ranks, place.size);
  EpochPlace where = placeOf(place.epoch, "split");
  if (const FailurePtr failure = errored()) throwFailure(failure);
  if (!std::binary_search(members.begin(), members.end(), place.rank)) return {};
  std::string name = options ? options->group_name : "";
  if (name.empty() || name == groupName()) {
    name = groupName() + ":split";
    for (const int member : members) name += ":" + std::to_string(member);
  }
  Creation creation;
  creation.store = store ? store : creators_store_;
  creation.group_name = name;
  creation.options = optionsOfChild(options);
  creation.may_resize = may_resize;
  where.prefix = below(where.prefix, "split/" + nameOfMembers(members, place.size));
  return derive(std::move(creation), place, members, where);
}

c10::intrusive_ptr<c10d::Backend> FtBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  TORCH_CHECK_VALUE(shrink_flags == kShrinkDefault || shrink_flags == kShrinkAbort,
                    "shrink: shrink_flags: expected SHRINK_DEFAULT (0) or SHRINK_ABORT (1), found ",
                    shrink_flags);
  const Place place = enter();
  const std::vector<int> left =
      membersWithout("shrink: ranks_to_exclude", ranks_to_exclude, place.size);
  TORCH_CHECK_VALUE(std::binary_search(left.begin(), left.end(), place.rank),
                    "shrink: ranks_to_exclude: expected ranks of others, found this one, ",
                    place.rank);
  EpochPlace where = placeOf(place.epoch, "shrink");
  where.prefix = below(where.prefix, "shrink/" + nameOfMembers(left, place.size));
  if (shrink_flags == kShrinkAbort) group_->abort("shrink() with SHRINK_ABORT was called");
  Creation creation;
  creation.store = creators_store_;
  creation.group_name = groupName() + ":shrunk";
  creation.options = optionsOfChild(options);
  creation.may_resize = false;
  return derive(std::move(creation), place, left, where);
}

FtBackend::EpochPlace FtBackend::placeOf(int64_t epoch, const char* operation) {
  const MutexLock lock(store_mutex_);
  TORCH_CHECK(epoch > 0 && formed_.epoch == epoch, operation,
              ": expected a group with an epoch, found none: configure() it first");
  return formed_;
}

std::vector<c10::intrusive_ptr<FtBackend>> FtBackend::childrenToCome() {
  std::vector<c10::intrusive_ptr<FtBackend>> children;
  const MutexLock lock(store_mutex_);
  children.reserve(to_come_.size());
  for (const auto& [where, child] : to_come_) children.push_back(child);
  return children;
}

// The one that has been tried in vain remembers what it was told, and what it told the others: one
// that does not would take its own words for news.
c10::intrusive_ptr<FtBackend> FtBackend::childAt(const EpochPlace& where, const Creation& creation,
                                                 const std::vector<int>& members) {
  {
    const MutexLock lock(store_mutex_);
    const auto tried = to_come_.find(where.prefix);
    if (tried != to_come_.end()) return tried->second;
  }
  auto child = c10::make_intrusive<FtBackend>(
      creation, makeEngine(creation.engine, *creation.options, creation.store, bound_device_));
  child->group_->expectMembersOf(*group_, members);
  const MutexLock lock(store_mutex_);
  TORCH_CHECK(formed_.epoch == where.epoch,
              "the group began another epoch while a group of its members was made: try again");
  return to_come_.try_emplace(where.prefix, std::move(child)).first->second;
}

c10::intrusive_ptr<FtBackend> FtBackend::derive(Creation creation, const Place& place,
                                                const std::vector<int>& members,
                                                const EpochPlace& where) {
  const auto own = std::lower_bound(members.begin(), members.end(), place.rank);
  creation.rank = static_cast<int>(own - members.begin());
  creation.size = static_cast<int>(members.size());
  creation.engine = engine_name_;
  creation.bound_device = bound_device_;
  const auto limit = creation.options->timeout;
  const Deadline deadline = Deadline::after(limit);
  const FailurePtr known = errored();
  auto child = childAt(where, creation, members);
  // From here on abort() reaches it.
  if (const FailurePtr failure = errored(); failure != known) throwFailure(failure);
  child->setTimeout(limit);
  child->keep(where.thread);
  child->begin(where.thread, where.prefix, creation.rank, creation.size, limit);
  child->awaitAll(deadline);
  const MutexLock lock(store_mutex_);
  to_come_.erase(where.prefix);
  return child;
}

// Nobody may look for the next group of the same members, which meets at the same place, before all
// of them are in this one.
void FtBackend::awaitAll(Deadline deadline) {
  Operation barrier;
  barrier.kind = OpKind::kBarrier;
  barrier.timeout = std::max<Duration>(deadline.remaining(), std::chrono::milliseconds(1));
  const auto state = group_->issue(std::move(barrier));
  try {
    // The watchdog ends it at its own deadline, which is the earlier one.
    if (!state->wait(deadline.isNever() ? deadline : Deadline::at(deadline.at() + kGrace)))
      group_->abort("the barrier of its members did not end");
  } catch (...) {
    group_->abort("a signal interrupted the making of the group");
    throw;
  }
  const FailurePtr failure = state->done() ? state->failure() : errored();
  if (failure) throwFailure(failure);
}

}  // namespace torchft_ext
