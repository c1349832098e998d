#include "nccl/nccl_engine.h"

#include <atomic>
#include <string>
#include <utility>

#include "base/log.h"
#include "nccl/memory_registry.h"
#include "nccl/nccl_communicator.h"

namespace torchft_ext {
namespace {

constexpr Duration kLookEvery = milliseconds(20);

std::atomic<bool> warned_of_unsafe_abort{false};  // once per process

void warnOfUnsafeAbort(const NcclApi& nccl) {
  if (nccl.has(NcclFeature::kSafeAbort) || warned_of_unsafe_abort.exchange(true)) return;
  log(LogLevel::kWarning, "NCCL " + dottedVersion(nccl.version()) +
                              " may hang in an abort; failures are told all the same, but device "
                              "memory and streams may not come back: use NCCL 2.26.2 or later");
}

NcclEngineOptions possible(NcclEngineOptions options, const NcclApi& nccl) {
  if (!options.blocking_calls || nccl.has(NcclFeature::kDeferredAbort)) return options;
  log(LogLevel::kWarning, "NCCL " + dottedVersion(nccl.version()) +
                              " cannot free a blocking communicator in which a call waits "
                              "(2.22.3 can): communicators are non-blocking");
  options.blocking_calls = false;
  return options;
}

std::string cannotCarryControl(const char* engine) {
  return std::string("the engine '") + engine +
         "' under NCCL makes communicators that carry no control messages for another engine";
}

class NcclEngine : public Engine {
 public:
  NcclEngine(std::shared_ptr<const NcclPlatform> platform, std::shared_ptr<Engine> control,
             NcclEngineOptions options)
      : platform_(std::move(platform)),
        control_(std::move(control)),
        options_(std::move(options)) {}
  const char* name() const override { return "nccl"; }
  std::variant<std::shared_ptr<Engine>, Failure> forMember(int member) override;
  std::vector<std::pair<std::string, int64_t>> counters() const override;
  std::variant<MemberRecord, Failure> describeSelf() override { return control_->describeSelf(); }
  std::unique_ptr<MemberProber> makeMemberProber(int size) override {
    return control_->makeMemberProber(size);
  }
  Duration frozenAfter() const override { return control_->frozenAfter(); }
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override;

 private:
  using Formed = std::variant<std::shared_ptr<Communicator>, Failure, std::monostate>;
  std::optional<Formed> awaitMemoryFreed(const Lifecycle& lifecycle, Deadline deadline,
                                         const std::function<bool()>& superseded) const;

  const std::shared_ptr<const NcclPlatform> platform_;
  const std::shared_ptr<Engine> control_;
  const NcclEngineOptions options_;
};

std::vector<std::pair<std::string, int64_t>> NcclEngine::counters() const {
  auto counters = control_->counters();
  const auto threads = sharedNcclThreads();
  const EventPoller::Counts watched = threads->poller->counts();
  const ReaperCounts reaped = threads->reaper.counts();
  counters.emplace_back("nccl_version", platform_->nccl->version());
  counters.emplace_back("nccl_operations_watched", watched.watched);
  counters.emplace_back("nccl_operations_draining", watched.draining);
  counters.emplace_back("nccl_ending", reaped.live);
  counters.emplace_back("nccl_aborted", reaped.aborted);
  counters.emplace_back("nccl_retired", reaped.retired);
  counters.emplace_back("nccl_stuck_aborts", reaped.stuck);
  counters.emplace_back("nccl_held_by_graphs", reaped.held_by_graphs);
  return counters;
}

std::variant<std::shared_ptr<Engine>, Failure> NcclEngine::forMember(int member) {
  auto made = control_->forMember(member);
  auto* control = std::get_if<std::shared_ptr<Engine>>(&made);
  if (control == nullptr || !*control) return made;
  return std::shared_ptr<Engine>(
      std::make_shared<NcclEngine>(platform_, std::move(*control), options_));
}

// Kernels of this process may write into memory that live peers have registered until NCCL has
// freed their communicators. The control engine's barrier comes after this wait on every member:
// who leaves it knows that none of them writes into its memory any more (promise 6). Without
// registrations there is nothing to wait for. nullopt: go on.
std::optional<NcclEngine::Formed> NcclEngine::awaitMemoryFreed(
    const Lifecycle& lifecycle, Deadline deadline, const std::function<bool()>& superseded) const {
  if (!options_.memory) return std::nullopt;
  while (!lifecycle.over()) {
    const auto left = options_.memory->notFreed();
    if (left.empty()) return std::nullopt;
    const std::string& name = left.front()->setup().name;
    if (deadline.expired())
      return lifecycle.ownFailure(
          FailureKind::kTimeout,
          "NCCL has not freed the communicator of " + name +
              ", whose kernels could still write into memory that other members have registered; "
              "the next attempt can work once it is freed; where the log says that a call does not "
              "return, start this process anew");
    if (superseded()) return std::monostate();
    runWaitHook();
    left.front()->awaitGone(deadline.orEarlier(kLookEvery));
  }
  return std::nullopt;  // the control engine says how it ended
}

std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> NcclEngine::form(
    const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
    const std::function<bool()>& superseded) {
  if (auto instead = awaitMemoryFreed(*lifecycle, deadline, superseded)) return *std::move(instead);
  auto formed = control_->form(roster, lifecycle, deadline, superseded);
  const auto* below = std::get_if<std::shared_ptr<Communicator>>(&formed);
  if (below == nullptr) return formed;
  auto control = std::dynamic_pointer_cast<ControlCommunicator>(*below);
  if (!control) {
    const Failure failure =
        lifecycle->ownFailure(FailureKind::kInternal, cannotCarryControl(control_->name()));
    lifecycle->fail(failure);  // before the communicator's end does, in words that say less
    return failure;
  }
  auto communicator = std::make_shared<NcclCommunicator>(
      GenerationComms::Setup{platform_, std::move(control), lifecycle, options_},
      sharedNcclThreads());
  // All members have passed the control engine's barrier: nobody starts anew from here on.
  if (options_.bound_device && !communicator->bindDevice(*options_.bound_device, deadline)) {
    if (const FailurePtr failure = lifecycle->failure()) return *failure;
    Failure late;
    late.kind = FailureKind::kTimeout;
    late.cause.how = "the NCCL communicator of " + options_.bound_device->str() +
                     " was not ready in time: does every rank bind a device?";
    return late;
  }
  return std::shared_ptr<Communicator>(std::move(communicator));
}

}  // namespace

bool knowsBlockingAborts(const NcclApi& nccl) {
  constexpr int kNotRead = 23200;
  return nccl.has(NcclFeature::kDeferredAbort) && nccl.version() < kNotRead;
}

std::shared_ptr<Engine> makeNcclEngine(std::shared_ptr<const NcclPlatform> platform,
                                       std::shared_ptr<Engine> control,
                                       const NcclEngineOptions& options) {
  warnOfUnsafeAbort(*platform->nccl);
  const NcclEngineOptions used = possible(options, *platform->nccl);
  return std::make_shared<NcclEngine>(std::move(platform), std::move(control), used);
}

bool stopNcclEngines(Deadline deadline) {
  return stopNcclThreads(deadline);
}

}  // namespace torchft_ext
