// The backend's own life: creation, epochs, settings. Operations are in ft_backend_collectives.cpp
// and ft_backend_transfers.cpp, how they are issued in ft_backend_issue.cpp.
#include "c10d/ft_backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <new>
#include <system_error>
#include <unordered_set>
#include <utility>
#include <variant>

#include "c10d/absence.h"
#include "c10d/comm_error.h"
#include "c10d/engines.h"
#include "c10d/environment.h"
#include "c10d/poison.h"
#include "c10d/reconfigure.h"
#include "c10d/store_adapter.h"
#include "c10d/store_layers.h"
#include "comm/callbacks.h"

namespace torchft_ext {
namespace {

// destroy_process_group() waits so long for what was issued to be sent.
constexpr std::chrono::seconds kShutdownWithin{5};

std::atomic<uint64_t> next_serial{0};  // any thread

FtBackend::Milliseconds chosenTimeout(const FtBackend::Creation& creation) {
  const bool own = creation.options->timeout_chosen || creation.timeout.count() <= 0;
  return own ? creation.options->timeout : creation.timeout;
}

// What `make` returns. Where it cannot, the others wait for this rank: they are told why it does
// not come, without advice that is this rank's.
template <typename Make>
auto orAbsence(const FtBackend::Creation& creation, const Make& make) {
  const auto tell = [&creation](const std::string& why) {
    if (!creation.begin) return;
    tellAbsence(creation.store, creation.rank, creation.size, durationOf(chosenTimeout(creation)),
                why);
  };
  auto made = [&] {
    try {
      return make();
    } catch (const c10::Error& error) {
      tell(error.what_without_backtrace());
      throw;
    } catch (const std::system_error& error) {
      tell(error.what());
      throw;
    } catch (const std::bad_alloc&) {
      tell("it ran out of memory");
      throw;
    }  // nobody is told of a signal or of a look-up without an answer: that would take long, too
  }();
  if (const auto* failure = std::get_if<Failure>(&made)) {
    tell(failure->cause.how);
    throwFailure(std::make_shared<Failure>(*failure));
  }
  return std::get<0>(std::move(made));
}

// A backend, and where its members meet.
struct Made {
  c10::intrusive_ptr<FtBackend> backend;
  StorePlace place;
};

std::variant<Made, Failure> makeBackend(const FtBackend::Creation& creation) {
  auto choice =
      engineOrFailure(creation.engine, *creation.options, creation.store, creation.bound_device);
  if (auto* failure = std::get_if<Failure>(&choice)) return std::move(*failure);
  Made made;
  made.backend =
      c10::make_intrusive<FtBackend>(creation, std::get<EngineChoice>(std::move(choice)));
  if (creation.begin) made.place = storePlaceOf(creation.store);
  return made;
}

// Calls that are all made, though a signal's handler throws in one of them: the first exception
// leaves with this object.
class AllOrThrow {
 public:
  AllOrThrow() = default;
  AllOrThrow(const AllOrThrow&) = delete;
  AllOrThrow& operator=(const AllOrThrow&) = delete;
  ~AllOrThrow() noexcept(false) {
    if (first_) std::rethrow_exception(first_);
  }
  template <typename Call>
  void run(const Call& call) {
    try {
      call();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }

 private:
  std::exception_ptr first_;
};

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

c10::intrusive_ptr<FtBackend> FtBackend::create(const Creation& creation) {
  TORCH_CHECK_VALUE(creation.size > 0,
                    "init_process_group: world_size: expected at least 1, found ", creation.size);
  creation.options->timeout = chosenTimeout(creation);
  checkRank({"init_process_group", "rank"}, creation.rank, creation.size);
  auto [backend, place] = orAbsence(creation, [&] { return makeBackend(creation); });
  if (!creation.begin) return backend;
  if (creation.beside) {
    creation.beside->guard_.check("the default group");
    backend->group_->expectMembersOf(*creation.beside->group_, creation.ranks_beside);
  }
  backend->keep(place.thread);
  backend->begin(place.thread, place.prefix, creation.rank, creation.size, std::nullopt);
  return backend;
}

FtBackend::FtBackend(const Creation& creation, EngineChoice choice)
    : c10d::Backend(creation.rank, creation.size),
      options_(creation.options),
      timeout_ms_(chosenTimeout(creation).count()),
      engine_(std::move(choice.engine)),
      poison_(std::move(choice.poison)),
      devices_(std::move(choice.devices)),
      memory_(std::move(choice.memory)),
      engine_name_(creation.engine),
      bound_device_(creation.bound_device),
      nan_check_(creation.options->nan_check.value_or(readEnvironment().nan_check.value_or(false))),
      may_resize_(creation.may_resize || kTorchFollowsBackend),
      fixed_rank_(creation.rank),
      fixed_size_(creation.size),
      creators_store_(creation.store),
      serial_(next_serial.fetch_add(1, std::memory_order_relaxed)),
      group_(std::make_shared<Group>(creation.group_name, engine_, sharedWatchdog(),
                                     durationOf(chosenTimeout(creation)),
                                     [hooks = abort_hooks_] { hooks->call(); })) {
  options_->timeout = chosenTimeout(creation);
  options_->group_name = creation.group_name;
  rememberGroup(group_);
}

FtBackend::~FtBackend() {
  if (!guard_.inherited()) return;
  // The threads and locks under an inherited group or store belong to the parent: let them leak.
  // A copy that nobody destroys, and not one from the heap: a destructor cannot report bad_alloc.
  alignas(std::shared_ptr<Group>) std::byte copy[sizeof(std::shared_ptr<Group>)];
  new (copy) std::shared_ptr<Group>(group_);
  creators_store_.release();
}

void FtBackend::configure(const std::string& store_address, int rank, int size,
                          std::optional<Milliseconds> timeout) {
  guard_.check("this process group");
  const StoreAddress address = parseStoreAddress(store_address);
  TORCH_CHECK_VALUE(size > 0, "configure: world_size: expected at least 1, found ", size);
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
  const std::shared_ptr<StoreThread> store = storeThreadFor(address);
  keep(store);
  begin(store, address.prefix, rank, size, timeout);
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE

bool FtBackend::supportsReconfigure() const {
  return true;
}

c10d::ReconfigureHandle FtBackend::get_reconfigure_handle() const {
  guard_.check("this process group");
  auto described = engine_->describeSelf();
  if (auto* failure = std::get_if<Failure>(&described))
    throwFailure(std::make_shared<Failure>(std::move(*failure)));
  const auto& self = std::get<MemberRecord>(described);
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
                " was already used for an epoch of this group; give each one its own");
  }
  const std::shared_ptr<StoreThread> store = membership.own_store
                                                 ? storePlaceOf(creators_store_).thread
                                                 : storeThreadFor(membership.store);
  keep(store);
  begin(store, membership.store.prefix, membership.rank, membership.size, options.timeout);
  {
    const MutexLock lock(store_mutex_);
    used_uuids_.insert(options.uuid);
  }
  return completedWork();
}

#endif

void FtBackend::keep(std::shared_ptr<StoreThread> store) {
  const MutexLock lock(store_mutex_);
  store_.swap(store);  // the previous one is let go of after the lock
}

void FtBackend::begin(const std::shared_ptr<StoreThread>& store, const std::string& prefix,
                      int rank, int size, std::optional<Milliseconds> timeout) {
  std::optional<Duration> limit;
  if (timeout) limit = durationOf(*timeout);
  FailurePtr failure;
  try {
    failure = group_->configure(store, prefix, rank, size, limit);
  } catch (const std::logic_error&) {
    throw;  // shut down, or configuring already: the running attempt is not ours to end
  } catch (...) {
    group_->abort("a signal interrupted configure()");
    noteFormed({});
    throw;
  }
  noteFormed(failure ? EpochPlace{} : EpochPlace{store, prefix, group_->epoch()});
  if (failure) throwFailure(failure);
  followEpoch();
}

void FtBackend::noteFormed(EpochPlace place) {
  std::map<std::string, c10::intrusive_ptr<FtBackend>> children;  // ended after the lock
  {
    const MutexLock lock(store_mutex_);
    std::swap(formed_, place);
    children.swap(to_come_);
  }
  AllOrThrow each;
  for (const auto& [where, child] : children) {
    each.run([&child = child] {
      child->abort("the group whose members it has began another epoch, or tried to");
    });
  }
}

void FtBackend::followEpoch() {
  const Place place = enter();
  sequence_.store(0, std::memory_order_relaxed);
  last_rank_.store(place.rank, std::memory_order_relaxed);
  last_size_.store(place.size, std::memory_order_relaxed);
  assignIfMutable(rank_, place.rank);
  assignIfMutable(size_, place.size);
}

void FtBackend::abort(const std::string& why) {
  guard_.check("this process group");
  AllOrThrow each;
  for (const auto& child : childrenToCome()) each.run([&] { child->abort(why); });
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
  if (memory_) memory_->close();
  for (const auto& child : childrenToCome()) each.run([&] { child->shutdown(); });
  each.run([&] {
    group_->shutdown(Deadline::after(std::min<Duration>(group_->timeout(), kShutdownWithin)));
  });
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
  extra_time_.add(durationOf(timeout));
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

int64_t FtBackend::epoch() const {
  guard_.check("this process group");
  return group_->epoch();
}

// A forked child asks too: a DataLoader's worker for its part of the data.
int FtBackend::currentRank() const {
  if (guard_.inherited()) return last_rank_.load(std::memory_order_relaxed);
  return group_->epoch() == 0 ? fixed_rank_ : group_->rank();
}

int FtBackend::currentSize() const {
  if (guard_.inherited()) return last_size_.load(std::memory_order_relaxed);
  return group_->epoch() == 0 ? fixed_size_ : group_->size();
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
  TORCH_CHECK_VALUE(abort_hooks_->add(hook_id, std::move(hook)),
                    "register_abort_hook: hook_id: expected one that is not taken, found ",
                    hook_id);
}

void FtBackend::unregisterAbortHook(int64_t hook_id) {
  guard_.check("this process group");
  TORCH_CHECK_VALUE(abort_hooks_->remove(hook_id),
                    "unregister_abort_hook: hook_id: expected that of a hook, found ", hook_id);
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
  Failure failure;
  failure.kind = FailureKind::kTimeout;
  failure.op = "wait_for_pending_works";
  failure.group = group_->name();
  failure.epoch = group_->epoch();
  failure.rank = currentRank();
  failure.size = currentSize();
  failure.cause.rank = failure.rank;
  failure.cause.how = "its completion hook has not returned from " + std::to_string(left) +
                      (left == 1 ? " operation" : " operations");
  failure.elapsed = Clock::now() - began;
  failure.limit = limit;
  throwFailure(std::make_shared<const Failure>(std::move(failure)));
}

}  // namespace torchft_ext
