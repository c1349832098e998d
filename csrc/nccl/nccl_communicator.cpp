#include "nccl/nccl_communicator.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {
namespace {

constexpr Duration kRetireWithin = std::chrono::seconds(1);

Lifecycle::Subscription reapOnFailure(const Launch::Context& context) {
  return context.lifecycle->subscribe(
      [comms = std::weak_ptr<GenerationComms>(context.comms),
       threads = std::weak_ptr<NcclThreads>(context.threads)](const FailurePtr&) {
        const auto generation = comms.lock();
        const auto alive = threads.lock();
        if (generation && alive) alive->reaper.abort(generation->takeAll());
      });
}

template <class Comms, class Holds>
bool allOf(const Comms& comms, Holds holds) {
  return std::all_of(comms.begin(), comms.end(), [&](const auto& comm) { return holds(*comm); });
}

Launch::Context contextOf(GenerationComms::Setup setup, std::shared_ptr<NcclThreads> threads) {
  Launch::Context context{setup.platform,
                          threads,
                          setup.lifecycle,
                          nullptr,
                          std::make_shared<Outstanding>(),
                          std::make_shared<PeersLeft>(),
                          std::make_shared<StreamTails>()};
  setup.control->onPeerLeft([left = context.left](int rank, bool begins_another) {
    left->add({rank, begins_another});
  });
  setup.threads = std::move(threads);
  setup.left = context.left;
  context.comms = std::make_shared<GenerationComms>(std::move(setup));
  return context;
}

}  // namespace

NcclCommunicator::NcclCommunicator(GenerationComms::Setup setup,
                                   std::shared_ptr<NcclThreads> threads)
    : control_(setup.control),
      context_(contextOf(std::move(setup), std::move(threads))),
      subscription_(reapOnFailure(context_)) {}

NcclCommunicator::~NcclCommunicator() {
  Failure failure;
  failure.kind = FailureKind::kAborted;
  failure.cause.rank = context_.lifecycle->identity().rank;
  failure.cause.how = "its group object was destroyed";
  failure.needs_new_group = true;
  context_.lifecycle->fail(std::move(failure));
  context_.lifecycle->unsubscribe(subscription_);
  context_.threads->reaper.abort(context_.comms->takeAll());  // if it had ended instead
}

bool NcclCommunicator::bindDevice(c10::Device device, Deadline deadline) {
  return context_.comms->get(device, -1, {OpKind::kBarrier, -1, deadline}) != nullptr;
}

void NcclCommunicator::issue(std::shared_ptr<OpState> state, Operation operation) {
  std::vector<Issue> one;
  one.push_back({std::move(state), std::move(operation)});
  issueTogether(std::move(one));
}

void NcclCommunicator::issueTogether(std::vector<Issue> issues) {
  std::vector<Issue> on_device;
  for (Issue& one : issues) {
    if (one.operation.device) {
      on_device.push_back(std::move(one));
    } else {
      control_->issue(std::move(one.state), std::move(one.operation));
    }
  }
  if (on_device.empty()) return;
  Launch(context_, std::move(on_device)).run();
}

bool NcclCommunicator::awaitIssued(Deadline deadline) {
  const uint64_t issued = context_.outstanding->mark();
  while (!context_.outstanding->awaitBelow(issued, deadline.orEarlier(kHookInterval))) {
    if (deadline.expired()) return false;
    runWaitHook();
  }
  context_.comms->lookForErrors();  // an error that the poller would find only some 50 ms later
  // The poller has looked for each operation, but for a graph's.
  if (context_.comms->anyCaptured() && !lookForUpdates(deadline)) return false;
  return control_->awaitIssued(deadline);
}

bool NcclCommunicator::lookForUpdates(Deadline deadline) {
  struct Waiter {
    Mutex mutex;
    CondVar changed;
    bool looked GUARDED_BY(mutex) = false;
  };
  const auto waiter = std::make_shared<Waiter>();
  const bool asked = control_->whenNoticesRead([waiter] {
    MutexLock lock(waiter->mutex);
    waiter->looked = true;
    waiter->changed.notifyAll();
  });
  while (asked) {
    {
      MutexLock lock(waiter->mutex);
      const Deadline slice = deadline.orEarlier(kHookInterval);
      while (!waiter->looked && !slice.expired()) waiter->changed.waitUntil(waiter->mutex, slice);
      if (waiter->looked || deadline.expired()) return waiter->looked;
    }
    runWaitHook();
  }
  return true;
}

bool NcclCommunicator::drain(Deadline deadline) {
  const bool last_look = deadline.expired();
  const bool drained = context_.threads->poller->isSelf() || awaitDrained(deadline);
  // Behind the wait, when everything has recorded where it ends; and not at each of many looks,
  // since every one puts a wait into the stream.
  if ((drained || last_look) && context_.lifecycle->failure())
    context_.tails->blockCurrentStreams(*context_.platform->cuda);
  return drained;
}

bool NcclCommunicator::awaitDrained(Deadline deadline) {
  const bool host = control_->drain(deadline);
  return context_.outstanding->awaitBelow(context_.outstanding->mark(), deadline) && host;
}

bool NcclCommunicator::leave(Deadline deadline) {
  const bool complete = awaitIssued(deadline) && !context_.lifecycle->failure();
  // The abort of what is under way could let a member take junk for data, unless it hears of a
  // failure (reap_batch.cpp): a goodbye is none.
  if (!complete && !context_.lifecycle->failure()) return false;
  // NCCL may wait for other ranks there: the goodbye must be said all the same. It is said before
  // NCCL frees anything, which takes it up to half a second, and closes connections in sight of
  // members that still wait for this one.
  const Deadline half = Deadline::after(deadline.remaining() / 2);
  const Comms retiring = complete ? retireAll(half) : Comms();
  const bool flushed = allOf(retiring, [&](auto& comm) { return comm.awaitRest(half); });
  const bool left = control_->leave(deadline);
  // Where something is under way still: the generation may have ended now, and then nobody fails
  // it.
  context_.threads->reaper.abort(context_.comms->takeAll());
  const bool freed = allOf(retiring, [&](auto& comm) { return comm.awaitGone(deadline); });
  return complete && flushed && left && freed;
}

// What is in the streams may be through in time; whether a graph is being replayed cannot be known,
// so where one holds operations the generation fails, which whoever looks at the results can see.
// The communicators may still be sending to members that are slower: they are finalized beside the
// next generation's beginning, and aborted where that takes too long.
bool NcclCommunicator::leaveForAnother(Deadline deadline) {
  if (context_.lifecycle->failure() || context_.comms->anyCaptured()) return false;
  if (!context_.outstanding->awaitBelow(context_.outstanding->mark(), deadline)) return false;
  if (context_.lifecycle->failure()) return false;
  Comms comms = takeIdle();
  if (context_.lifecycle->failure()) return false;
  context_.threads->reaper.retire(std::move(comms), Deadline::after(kRetireWithin));
  return control_->leaveForAnother(deadline);
}

// Another thread may have issued an operation since nothing was outstanding: what is numbered by
// now is under way, what is numbered later finds no communicator. Then the generation has failed.
NcclCommunicator::Comms NcclCommunicator::takeIdle() {
  Comms comms = context_.comms->takeAll();
  const auto& outstanding = context_.outstanding;
  if (outstanding->awaitBelow(outstanding->mark(), Deadline::after(Duration::zero()))) return comms;
  context_.lifecycle->fail(context_.lifecycle->ownFailure(
      FailureKind::kAborted, "an operation was issued while the generation was being left"));
  context_.threads->reaper.abort(std::move(comms));
  return {};
}

// Where the generation has failed there is none: they are being aborted.
NcclCommunicator::Comms NcclCommunicator::retireAll(Deadline deadline) {
  if (context_.lifecycle->failure()) return {};
  Comms comms = takeIdle();
  if (context_.lifecycle->failure()) return {};
  context_.threads->reaper.retire(comms, deadline);
  // Those of graphs are held by them.
  comms.erase(
      std::remove_if(comms.begin(), comms.end(), [](const auto& comm) { return comm->captured(); }),
      comms.end());
  return comms;
}

}  // namespace torchft_ext
