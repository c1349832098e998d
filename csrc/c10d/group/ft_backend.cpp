// The backend's own life: generations, settings, groups of its members. ft_backend_operations.cpp
// has the operations.
#include "c10d/group/ft_backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <unordered_set>
#include <utility>
#include <variant>

#include "base/identity.h"
#include "c10d/adapter/all_or_throw.h"
#include "c10d/adapter/poison.h"
#include "c10d/group/environment.h"
#include "c10d/group/host_options.h"
#include "c10d/group/reconfigure.h"
#include "c10d/group/subgroups.h"
#include "c10d/store/store_adapter.h"
#include "c10d/store/store_layers.h"
#include "c10d/work/comm_error.h"
#include "comm/callbacks.h"
#include "device/devices_end.h"

namespace torchft_ext {
namespace {

// destroy_process_group() waits so long for what was issued to be sent.
constexpr std::chrono::seconds kShutdownWithin{5};

// Flags of torch.distributed.shrink_group().
constexpr int kShrinkDefault = 0;
constexpr int kShrinkAbort = 1;

std::atomic<uint64_t> next_serial{0};  // any thread

bool nanCheckOf(const FtOptions& options) {
  return options.nan_check.value_or(readEnvironment().nan_check.value_or(false));
}

Duration askAfterOf(const FtOptions& options) {
  if (options.ask_after) return *options.ask_after;
  const auto of_environment = readEnvironment().ask_after;
  return of_environment ? Duration(*of_environment) : kAskAfter;
}

std::shared_ptr<Poison> poisonOf(const FtOptions& options, const Devices& devices) {
  if (!options.poison || devices.platform() == nullptr) return nullptr;
  return std::make_shared<Poison>(devices.platform()->type());
}

// Assigns where torch allows it (2.14 and later).
template <typename T>
void assignIfMutable(T& field, int value) {
  if constexpr (!std::is_const_v<T>) field = value;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE

std::vector<std::string> orderedHandles(const c10d::ReconfigureOptions& options) {
  if (const auto* ordered = std::get_if<std::vector<std::string>>(&options.handles))
    return *ordered;
  const auto& unordered = std::get<std::unordered_set<std::string>>(options.handles);
  std::vector<std::string> handles(unordered.begin(), unordered.end());
  std::sort(handles.begin(), handles.end());
  return handles;
}

FtBackend::WorkPtr completedWork() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
  return c10d::Work::create_from_future(future);
}

#endif

}  // namespace

FtBackend::FtBackend(const GroupSpec& spec, EngineChoice choice)
    : c10d::Backend(spec.rank, spec.size),
      options_(spec.options),
      timeout_ms_(spec.chosenTimeout().count()),
      poison_(poisonOf(*spec.options, choice.devices)),
      engine_name_(spec.engine),
      bound_device_(spec.bound_device),
      may_resize_(spec.may_resize || kTorchFollowsBackend),
      fixed_rank_(spec.rank),
      fixed_size_(spec.size),
      creators_store_(spec.store),
      backend_name_(spec.backend_name),
      serial_(next_serial.fetch_add(1, std::memory_order_relaxed)),
      group_(std::make_shared<Group>(
          spec.name, std::move(choice.engine), sharedWatchdog(), durationOf(spec.chosenTimeout()),
          [hooks = abort_hooks_] { hooks->call(); },
          [poison = poison_, listener = listener_](const auto& lifecycle) {
            if (poison) poison->begin(lifecycle);
            listener->follow(lifecycle);
          })),
      issuer_(group_, std::move(choice.devices), poison_, spec.bound_device, hook_, success_hooks_,
              {nanCheckOf(*spec.options), spec.options->blocking_wait,
               ProfilerTitles(spec.backend_name)}),
      memory_(group_, issuer_.devices(), std::move(choice.memory)) {
  options_->timeout = spec.chosenTimeout();
  options_->group_name = spec.name;
  group_->setAskAfter(askAfterOf(*spec.options));
  rememberGroup(group_);
}

FtBackend::~FtBackend() {
  // The threads and locks under an inherited group or store belong to the parent: let them leak.
  if (guard_.inherited()) creators_store_.release();
  if (!guard_.inherited() && !devicesEnded()) return;
  leak(group_);
  leak(poison_);
}

void FtBackend::followNetwork(const FtOptions& options) {
  FtOptions chosen(*options_);
  if (!chosen.interface) chosen.interface = options.interface;
  if (!chosen.port_range) chosen.port_range = options.port_range;
  if (!chosen.heartbeat) chosen.heartbeat = options.heartbeat;
  const bool differs = hostOptionsOf(chosen, creators_store_).key() !=
                       hostOptionsOf(*options_, creators_store_).key();
  options_->interface = chosen.interface;
  options_->port_range = chosen.port_range;
  options_->heartbeat = chosen.heartbeat;
  if (!differs) return;
  // Memory pools stay registered: those of the engine before, and with the same registry.
  auto made = makeEngine(engine_name_, chosen, creators_store_, bound_device_, memory_.registry());
  group_->useEngine(std::move(made.engine));
}

void FtBackend::configure(const std::string& store_address, int rank, int size,
                          std::optional<Milliseconds> timeout) {
  guard_.check("this process group");
  const StoreAddress address = parseStoreAddress("configure: store_addr", store_address);
  checkSize({"configure", "world_size"}, size);
  checkRank({"configure", "rank"}, rank, size);
  TORCH_CHECK_VALUE(!timeout || timeout->count() > 0,
                    "configure: timeout: expected a positive time, found ",
                    timeout.value_or(Milliseconds(0)).count(), " ms");
  TORCH_CHECK(may_resize_ || (rank == fixed_rank_ && size == fixed_size_),
              "configure: this group has backends of several ",
              "kinds (a spec such as 'cpu:ft_host,cuda:nccl') or was split from another group, and "
              "this torch fixes its rank and "
              "size when it is made: expected rank ",
              fixed_rank_, " of ", fixed_size_, ", found rank ", rank, " of ", size,
              "; use a group with the single backend 'ft', or torch 2.14 or later");
  form({storeThreadFor(address), address.prefix}, rank, size, timeout);
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE

bool FtBackend::supportsReconfigure() const {
  return true;
}

c10d::ReconfigureHandle FtBackend::get_reconfigure_handle() const {
  guard_.check("this process group");
  auto described = engine()->describeSelf();
  if (auto* failure = std::get_if<Failure>(&described))
    throwFailure(std::make_shared<Failure>(std::move(*failure)));
  auto self = std::get<MemberRecord>(std::move(described));
  self.incarnation = selfIncarnation();  // whichever member it is by now: a handle stays the same
  StoreAddress store;
  TORCH_CHECK_VALUE(serverAddress(creators_store_, &store),
                    "get_reconfigure_handle: expected a group over a TCPStore, whose address the "
                    "other members can be told; found a store of another kind");
  store.prefix = prefixOf(creators_store_);
  return makeHandle(self, serial_, seenByOthers(std::move(store), self));
}

FtBackend::WorkPtr FtBackend::reconfigure(const c10d::ReconfigureOptions& options) {
  const HandledMembership membership =
      membershipOf(orderedHandles(options), get_reconfigure_handle(), options.uuid);
  TORCH_CHECK_VALUE(!options.timeout || options.timeout->count() > 0,
                    "reconfigure: timeout: expected a positive time, found ",
                    options.timeout.value_or(Milliseconds(0)).count(), " ms");
  {
    const MutexLock lock(store_mutex_);
    TORCH_CHECK(used_uuids_.count(options.uuid) == 0, "reconfigure: uuid: ", options.uuid,
                " was already used for a generation of this group; give each one its own");
  }
  const std::shared_ptr<StoreThread> store = membership.own_store
                                                 ? storePlaceOf(creators_store_).thread
                                                 : storeThreadFor(membership.store);
  form({store, membership.store.prefix}, membership.rank, membership.size, options.timeout);
  {
    const MutexLock lock(store_mutex_);
    used_uuids_.insert(options.uuid);
  }
  return completedWork();
}

#endif

void FtBackend::form(MeetingPlace where, int rank, int size, std::optional<Milliseconds> timeout) {
  const FailurePtr failure = tryForm(std::move(where), rank, size, timeout);
  if (failure) throwFailure(failure);
}

FailurePtr FtBackend::tryForm(MeetingPlace where, int rank, int size,
                              std::optional<Milliseconds> timeout) {
  {
    std::shared_ptr<StoreThread> before = where.thread;  // goes after the lock
    const MutexLock lock(store_mutex_);
    store_.swap(before);
  }
  std::optional<Duration> limit;
  if (timeout) limit = durationOf(*timeout);
  FailurePtr failure;
  try {
    failure = group_->configure(where.thread, where.prefix, rank, size, limit, where.purpose);
  } catch (const std::logic_error&) {
    throw;  // shut down, or configuring already: the running attempt is not ours to end
  } catch (...) {
    group_->abort("a signal interrupted configure()");
    derived_.follow({}, 0);
    throw;
  }
  if (failure) {
    derived_.follow({}, 0);
    return failure;
  }
  derived_.follow(std::move(where), group_->generation());
  followGeneration();
  return nullptr;
}

void FtBackend::expectMembersOf(const FtBackend& other, const std::vector<int>& ranks) {
  other.guard_.check("the default group");
  group_->expectMembersOf(*other.group_, ranks);
}

RankInGeneration FtBackend::enter() const {
  guard_.check("this process group");
  while (true) {
    const int64_t generation = group_->generation();
    const RankInGeneration place{generation, currentRank(), currentSize()};
    if (group_->generation() == generation) return place;
  }
}

void FtBackend::followGeneration() {
  const RankInGeneration place = enter();
  issuer_.countAnew();
  last_rank_.store(place.rank, std::memory_order_relaxed);
  last_size_.store(place.size, std::memory_order_relaxed);
  assignIfMutable(rank_, place.rank);
  assignIfMutable(size_, place.size);
}

void FtBackend::abort(const std::string& why) {
  guard_.check("this process group");
  AllOrThrow each;
  for (const auto& child : derived_.underWay()) each.run([&] { child->abort(why); });
  each.run([&] { group_->abort(why); });
}

void FtBackend::check(std::optional<Milliseconds> timeout) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(!timeout || timeout->count() > 0,
                    "check: timeout: expected a positive time, found ",
                    timeout.value_or(Milliseconds(0)).count(), " ms");
  const Duration limit = timeout ? durationOf(*timeout) : group_->timeout();
  FailurePtr failure;
  try {
    failure = group_->check(Deadline::after(limit));
  } catch (...) {
    group_->abort("a signal interrupted check()");
    throw;
  }
  if (failure) throwFailure(failure);
}

void FtBackend::shutdown() {
  guard_.check("this process group");
  AllOrThrow each;
  memory_.close();
  for (const auto& child : derived_.underWay()) each.run([&] { child->shutdown(); });
  each.run([&] {
    group_->shutdown(Deadline::after(std::min<Duration>(group_->timeout(), kShutdownWithin)));
  });
  // Its thread ends with its last group, whoever still holds this object.
  derived_.close();
  std::shared_ptr<StoreThread> last;  // goes after the lock
  const MutexLock lock(store_mutex_);
  last.swap(store_);
}

void FtBackend::reopen() {
  guard_.check("this process group");
  group_->reopen();
}

void FtBackend::setTimeout(Milliseconds timeout) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(timeout.count() > 0, "set_timeout: timeout: expected a positive time, found ",
                    timeout.count(), " ms");
  timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
  group_->setTimeout(durationOf(timeout));
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
void FtBackend::addEphemeralTimeout(const Milliseconds& timeout) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(timeout.count() > 0,
                    "add_ephemeral_timeout: timeout: expected a positive time, found ",
                    timeout.count(), " ms");
  issuer_.addTime(durationOf(timeout));
}
#endif

c10::intrusive_ptr<FtOptions> FtBackend::optionsNow() const {
  auto options = c10::make_intrusive<FtOptions>(*options_);
  options->timeout = Milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  return options;
}

FailurePtr FtBackend::errored() const {
  guard_.check("this process group");
  return group_->errored();
}

int64_t FtBackend::generation() const {
  guard_.check("this process group");
  return group_->generation();
}

// A forked child asks too: a DataLoader's worker for its part of the data.
int FtBackend::currentRank() const {
  if (guard_.inherited()) return last_rank_.load(std::memory_order_relaxed);
  return group_->generation() == 0 ? fixed_rank_ : group_->rank();
}

int FtBackend::currentSize() const {
  if (guard_.inherited()) return last_size_.load(std::memory_order_relaxed);
  return group_->generation() == 0 ? fixed_size_ : group_->size();
}

std::vector<Incarnation> FtBackend::incarnations(bool before) const {
  guard_.check("this process group");
  return before ? group_->incarnationsBefore() : group_->incarnations();
}

GroupStats FtBackend::stats() const {
  guard_.check("this process group");
  return group_->stats();
}

const std::string& FtBackend::groupName() const {
  return group_->name();
}

c10d::ErrorType FtBackend::getError() {
  const FailurePtr failure = errored();
  if (!failure) return c10d::ErrorType::SUCCESS;
  switch (failure->kind) {
    case FailureKind::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case FailureKind::kPeerLost:
    case FailureKind::kPeerLeft:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

#ifdef C10D_BACKEND_HAS_HOOKS
void FtBackend::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(hook != nullptr, "register_abort_hook: hook: expected a function, found none");
  TORCH_CHECK_VALUE(abort_hooks_->table().add(hook_id, std::move(hook)),
                    "register_abort_hook: hook_id: expected one that is not taken, found ",
                    hook_id);
}

void FtBackend::unregisterAbortHook(int64_t hook_id) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(abort_hooks_->table().remove(hook_id),
                    "unregister_abort_hook: hook_id: expected that of a hook, found ", hook_id);
}
#endif

#ifdef TORCHFT_EXT_WORK_HAS_KEY
void FtBackend::registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(hook != nullptr,
                    "register_completion_hook: hook: expected a function, found none");
  const auto told = [hook = std::move(hook)](uint64_t key, std::optional<float> milliseconds) {
    hook({key, milliseconds});
  };
  TORCH_CHECK_VALUE(success_hooks_->table().add(hook_id, told),
                    "register_completion_hook: hook_id: expected one that is not taken, found ",
                    hook_id);
}

void FtBackend::unregisterCompletionHook(int64_t hook_id) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(success_hooks_->table().remove(hook_id),
                    "unregister_completion_hook: hook_id: expected that of a hook, found ",
                    hook_id);
}
#endif

void FtBackend::registerOnCompletionHook(CompletionHook::Hook&& hook) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(hook != nullptr,
                    "register_on_completion_hook: expected a function, found none");
  TORCH_CHECK(hook_->set(std::move(hook)),
              "register_on_completion_hook: expected the first hook of this group, found another "
              "one registered");
  enableCollectivesTiming();
  onCompletionHook_ = [kept = hook_](const std::shared_ptr<c10d::WorkInfo>& info) {
    kept->run(info);
  };
}

size_t FtBackend::awaitHook(Deadline deadline) {
  try {
    return hook_->awaitAll(deadline);
  } catch (...) {
    group_->abort("a signal interrupted wait_for_pending_works()");
    throw;
  }
}

void FtBackend::waitForPendingWorks() {
  guard_.check("this process group");
  TORCH_CHECK(!onCallbackThread(),
              "wait_for_pending_works: called from a callback of a finished operation, it would "
              "wait for itself");
  const Clock::time_point began = Clock::now();
  const Duration limit = group_->timeout();
  const size_t left = awaitHook(Deadline::after(limit));
  if (left == 0) return;
  throwFailure(timeoutOf(*group_, "wait_for_pending_works",
                         "its completion hook has not returned from " + std::to_string(left) +
                             (left == 1 ? " operation" : " operations"),
                         began, limit));
}

// ---------------------------------------------------------------- groups of this one's members

// torch hands over the parent's own object, or a copy of it, or a plain one: never changed here.
c10::intrusive_ptr<FtOptions> FtBackend::optionsOfChild(
    const c10::intrusive_ptr<c10d::Backend::Options>& given) const {
  auto* own = dynamic_cast<FtOptions*>(given.get());
  auto options = own != nullptr ? c10::make_intrusive<FtOptions>(*own) : optionsNow();
  if (given) options->timeout = given->timeout;
  return options;
}

GroupSpec FtBackend::specOfChild(const c10::intrusive_ptr<c10d::Store>& store,
                                 const c10::intrusive_ptr<c10d::Backend::Options>& options) const {
  GroupSpec spec;
  spec.store = store ? store : creators_store_;
  spec.backend_name = backend_name_;
  spec.engine = engine_name_;
  spec.bound_device = bound_device_;
  spec.options = optionsOfChild(options);
  return spec;
}

c10::intrusive_ptr<c10d::Backend> FtBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  return splitOff(store, ranks, options, false);
}

c10::intrusive_ptr<FtBackend> FtBackend::splitOff(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options, bool may_resize) {
  const RankInGeneration place = enter();
  const std::vector<int> members = checkedMembers("split: ranks", ranks, place.size);
  MeetingPlace where =
      derived_.placeFor("split/" + nameOfMembers(members, place.size), place.generation, "split");
  if (const FailurePtr failure = errored()) throwFailure(failure);
  if (std::find(members.begin(), members.end(), place.rank) == members.end()) return {};
  GroupSpec spec = specOfChild(store, options);
  spec.may_resize = may_resize;
  spec.name = options ? options->group_name : "";
  if (spec.name.empty() || spec.name == groupName()) {
    spec.name = groupName() + ":split";
    for (const int member : members) spec.name += ":" + std::to_string(member);
  }
  return derived_.make(std::move(spec), place, members, std::move(where));
}

c10::intrusive_ptr<c10d::Backend> FtBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  TORCH_CHECK_VALUE(shrink_flags == kShrinkDefault || shrink_flags == kShrinkAbort,
                    "shrink: shrink_flags: expected SHRINK_DEFAULT (0) or SHRINK_ABORT (1), found ",
                    shrink_flags);
  const RankInGeneration place = enter();
  const std::vector<int> left =
      membersWithout("shrink: ranks_to_exclude", ranks_to_exclude, place.size);
  TORCH_CHECK_VALUE(std::binary_search(left.begin(), left.end(), place.rank),
                    "shrink: ranks_to_exclude: expected ranks of others, found this one, ",
                    place.rank);
  MeetingPlace where =
      derived_.placeFor("shrink/" + nameOfMembers(left, place.size), place.generation, "shrink");
  if (shrink_flags == kShrinkAbort) group_->abort("shrink() with SHRINK_ABORT was called");
  GroupSpec spec = specOfChild({}, options);
  spec.name = groupName() + ":shrunk";
  spec.may_resize = false;
  return derived_.make(std::move(spec), place, left, std::move(where));
}

// ---------------------------------------------------------------- memory pools

void FtBackend::registerMemPool(MemoryPool pool) {
  guard_.check("this process group");
  memory_.add(std::move(pool));
}

void FtBackend::deregisterMemPool(const PoolId& id) {
  guard_.check("this process group");
  memory_.remove(id);
}

}  // namespace torchft_ext
