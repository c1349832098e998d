#include "c10d/group/derived_groups.h"

#include <algorithm>
#include <utility>

#include "c10d/adapter/all_or_throw.h"
#include "c10d/group/engines.h"
#include "c10d/group/ft_backend.h"
#include "c10d/work/comm_error.h"

namespace torchft_ext {
namespace {

constexpr Duration kGrace = std::chrono::seconds(1);

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "/" + name;
}

// Nobody may look for the next group of the same members, which meets at the same place, before all
// of them are in this one.
void awaitAll(FtBackend& child, Deadline deadline) {
  Group& group = child.group();
  Operation barrier;
  barrier.kind = OpKind::kBarrier;
  barrier.timeout = std::max<Duration>(deadline.remaining(), std::chrono::milliseconds(1));
  const auto state = group.issue(std::move(barrier));
  try {
    // The watchdog ends it at its own deadline, which is the earlier one.
    if (!state->wait(deadline.isNever() ? deadline : Deadline::at(deadline.at() + kGrace)))
      group.abort("the barrier of its members did not end");
  } catch (...) {
    group.abort("a signal interrupted the making of the group");
    throw;
  }
  const FailurePtr failure = state->done() ? state->failure() : group.errored();
  if (failure) throwFailure(failure);
}

}  // namespace

void DerivedGroups::follow(MeetingPlace place, int64_t generation) {
  std::map<std::string, BackendPtr> children;  // ended after the lock
  {
    const MutexLock lock(mutex_);
    std::swap(place_, place);
    generation_ = generation;
    closed_ = false;
    children.swap(to_come_);
  }
  AllOrThrow each;
  for (const auto& [where, child] : children) {
    each.run([&child = child] {
      child->abort("the group whose members it has began another generation, or tried to");
    });
  }
}

void DerivedGroups::close() {
  follow({}, 0);
  const MutexLock lock(mutex_);
  closed_ = generation_ == 0;
}

MeetingPlace DerivedGroups::placeFor(const std::string& name, int64_t generation,
                                     const char* operation) const {
  const MutexLock lock(mutex_);
  TORCH_CHECK(!closed_, operation,
              ": expected a group with a generation, found one that was shut down: make a new "
              "group");
  TORCH_CHECK(
      generation > 0 && generation_ == generation, operation,
      ": expected a group with a generation, found none: ",
      parent_.group().job().inJob() == InJob::kNo
          ? "configure() it first"
          : "it comes with the elastic job's next view, in elastic.steps() or by job.recover()");
  return {place_.thread, joined(place_.prefix, name)};
}

std::vector<DerivedGroups::BackendPtr> DerivedGroups::underWay() const {
  std::vector<BackendPtr> children;
  const MutexLock lock(mutex_);
  children.reserve(to_come_.size());
  for (const auto& [where, child] : to_come_) children.push_back(child);
  return children;
}

// The one that has been tried in vain remembers what it was told, and what it told the others: one
// that does not would take its own words for news.
DerivedGroups::BackendPtr DerivedGroups::childAt(const MeetingPlace& where, int64_t generation,
                                                 const GroupSpec& spec,
                                                 const std::vector<int>& members) {
  {
    const MutexLock lock(mutex_);
    const auto tried = to_come_.find(where.prefix);
    if (tried != to_come_.end()) return tried->second;
  }
  auto child = c10::make_intrusive<FtBackend>(
      spec, makeEngine(spec.engine, *spec.options, spec.store, spec.bound_device));
  child->expectMembersOf(parent_, members);
  child->group().setJob(parent_.group().job().beside(/*by_rule=*/false));
  const MutexLock lock(mutex_);
  TORCH_CHECK(
      generation_ == generation,
      "the group began another generation while a group of its members was made: try again");
  return to_come_.try_emplace(where.prefix, std::move(child)).first->second;
}

DerivedGroups::BackendPtr DerivedGroups::make(GroupSpec spec, const RankInGeneration& parents,
                                              const std::vector<int>& members, MeetingPlace where) {
  const auto own = std::find(members.begin(), members.end(), parents.rank);
  spec.rank = static_cast<int>(own - members.begin());
  spec.size = static_cast<int>(members.size());
  const auto limit = spec.options->timeout;
  const Deadline deadline = Deadline::after(limit);
  const FailurePtr known = parent_.errored();
  const BackendPtr child = childAt(where, parents.generation, spec, members);
  // From here on the parent's abort() reaches it.
  if (const FailurePtr failure = parent_.errored(); failure != known) throwFailure(failure);
  child->setTimeout(limit);
  const std::string place = where.prefix;
  child->form(std::move(where), spec.rank, spec.size, limit);
  awaitAll(*child, deadline);
  const MutexLock lock(mutex_);
  to_come_.erase(place);
  return child;
}

}  // namespace torchft_ext
