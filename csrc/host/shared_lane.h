// The ordered collectives of a generation whose members share a host: a queue, and who executes it.
//
// An operation is queued, running (it has begun), or complete. The lane is free, owned by a thread
// that executes, or over. One thread at a time owns it; what it does not finish another one goes on
// with. Owners are:
//   add()      the issuing thread, for as long as nothing blocks, and not for long;
//   help()     a thread that waits for an operation: it blocks for others, and ends with its own;
//   advance()  the loop, for as long as nothing blocks, a turn at a time. It comes again by a post,
//              or by the nudge of a peer that this rank has armed.
// So whoever gives the lane back with something in the queue wakes those that wait in help(), or
// arms, or posts; but for the issuer of an operation that it waits for next. Whoever is nudged
// while another thread owns the lane leaves a note for that one.
//
// No user code runs, and no lock is held, while a thread owns the lane; but operations complete
// then, in their order, and what runs at once on completion never waits.
//
// Owner: HostGeneration and HostCommunicator, and whoever is inside a call, so that the memory
// outlives it. Threads: any; needs(), peerLeft() and watchFor() the loop's. Only help() and
// awaitLeft() block.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "comm/op_state.h"
#include "host/collectives.h"
#include "host/shared_board.h"
#include "host/shared_execution.h"
#include "host/traffic.h"

namespace torchft_ext {

class SharedLane : public Collectives,
                   public OpHelper,
                   public std::enable_shared_from_this<SharedLane> {
 public:
  struct Callbacks {
    // done() is as watchFor() or peerLeft() said, or beyond. Any thread, in the lane.
    std::function<void()> exchanged;
    // advance() is to be called on the loop. False: it has ended.
    std::function<bool()> post;
    // An armed peer is to be told that there is something for it. Any thread, in the lane.
    std::function<void(int peer)> nudge;
  };

  // What the members have agreed on while the generation formed, and the process's counts.
  struct Terms {
    SharedPlans plans;
    bool few_cores = false;  // a member has fewer than there are members
    std::shared_ptr<SharedUse> use;
  };

  // A mismatch, or no memory, fails the lifecycle.
  SharedLane(std::shared_ptr<SharedMemory> memory, int rank, int size, Terms terms,
             std::shared_ptr<Lifecycle> lifecycle, std::shared_ptr<Traffic> traffic,
             Callbacks callbacks);

  void add(std::shared_ptr<OpState> state, Operation operation) override;
  void advance();  // loop
  bool help(OpState& state, Deadline deadline) override;
  // With something in the queue the loop comes, unless somebody has the lane.
  void post() noexcept;

  bool idle() const override;
  First first() const override;
  uint64_t done() const override { return done_.load(); }
  bool needs(int peer) const override;
  bool needsNow(int /*peer*/) const override { return false; }  // what it has done is in memory
  void peerLeft(int peer, uint64_t exchanges) override;
  void watchFor(uint64_t exchanges) override;
  Pending cancelAll() override;
  // A thread that executes looks at the lifecycle now.
  void wakeExecutor() { board_.wakeExecutor(); }
  // After cancelAll(): nobody executes any more. False: not by the deadline.
  bool awaitLeft(Deadline deadline);

 private:
  enum class Phase : uint8_t { kLoad, kBegin, kRun, kCompute, kStore };
  struct Item {
    std::shared_ptr<OpState> state;
    Operation operation;
    Phase phase = Phase::kLoad;
  };
  // Why a thread stops to execute.
  enum class Stop : uint8_t { kEmpty, kWaits, kTurn, kOver };

  bool take();
  bool arm();
  void sleep(const OpState& state, Deadline deadline);
  void lookWhetherWatched() noexcept;
  void giveBack(Stop stop, bool issuer_waits);
  // until: stops with kTurn once that is done; may be null.
  Stop execute(size_t* budget, const OpState* until = nullptr);
  // nullopt: the operation is through.
  std::optional<Stop> run(Item& item, size_t* budget);
  std::optional<Stop> exchange(Item& item, size_t* budget);
  std::optional<Stop> afterExchange(Item& item);
  Stop executeUntil(const OpState& state, Deadline deadline);
  Item* front();
  bool completeFront();
  void completeAll(const std::list<Item>& items);
  Stop fail(FailureKind kind, int culprit, std::string how);
  Stop failAs(SharedExecution::State state);
  FailurePtr whyOver() const;
  void countExchange();
  bool isOver() const { return over_.load(std::memory_order_acquire) || lifecycle_->over(); }

  const std::shared_ptr<Lifecycle> lifecycle_;
  const std::shared_ptr<Traffic> traffic_;
  const Callbacks callbacks_;
  const int rank_;
  const bool few_cores_;

  // The owner's, of the lane.
  SharedBoard board_;
  SharedExecution execution_;

  std::vector<std::optional<uint64_t>> left_at_;  // the loop's
  std::atomic<uint64_t> watched_for_;
  std::atomic<uint64_t> done_{0};
  std::atomic<bool> over_{false};  // written under mutex_
  mutable Mutex mutex_;
  CondVar changed_;
  bool owned_ GUARDED_BY(mutex_) = false;
  bool posted_ GUARDED_BY(mutex_) = false;
  bool asked_ GUARDED_BY(mutex_) = false;      // advance() found it owned
  std::atomic<bool> left_to_sleepers_{false};  // written under mutex_: one of them has to come
  int sleepers_ GUARDED_BY(mutex_) = 0;        // in help(), while another thread owns the lane
  std::list<Item> queue_ GUARDED_BY(mutex_);   // its front is the owner's
  std::list<Item> spare_ GUARDED_BY(mutex_);   // nodes to use again, so that no operation allocates
};

}  // namespace torchft_ext
