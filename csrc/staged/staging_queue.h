// The operations of one communicator that go through host memory, and those that have to wait for
// them: in the order of issue.
//
// States of an operation, each with its way on (docs/staged.md has what an abort does there):
//   queued      nothing is enqueued. What it reads may be copied when its caller's stream has come
//               so far, and no earlier collective will still write there.
//   loading     copies into host memory run on the device.
//   loaded      waits for those before it in its lane, which have not been handed over.
//   exchanging  the CPU engine has it, under a state of its own.
//   storing     copies into the tensors run on the device.
// It is complete when those are done: its results are there for whatever is enqueued next, on
// whatever stream. Copies are enqueued only when they can run at once, so that loading and storing
// take as long as the copies, whatever user code has in its streams.
//
// Lanes: collectives that all ranks issue in one order; sends; the rest (receives, collectives of
// callbacks), which waits for nobody. Operations on host memory are in a lane only behind others.
//
// Owner: the communicator, and the staging thread while there is something in it. Threads: look()
// the staging thread's, the rest any. Only awaitTaken() blocks.
#pragma once

#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "comm/communicator.h"
#include "comm/outstanding.h"
#include "device/device_platform.h"
#include "device/event_pool.h"
#include "device/staged_side.h"
#include "staged/copy_streams.h"

namespace torchft_ext {

class StagingQueue : public std::enable_shared_from_this<StagingQueue> {
 public:
  StagingQueue(std::shared_ptr<Communicator> host, std::shared_ptr<Lifecycle> lifecycle,
               std::shared_ptr<const DevicePlatform> platform);
  ~StagingQueue();

  // In the order of issue. False: nothing here is before it; it is left to its caller.
  bool take(std::shared_ptr<OpState>& state, Operation& operation);
  // Waits until everything that was taken before this call is complete. False: not by the deadline.
  bool awaitTaken(Deadline deadline) {
    return outstanding_.awaitBelow(outstanding_.mark(), deadline);
  }

  struct Progress {
    bool moved = false;
    bool asks_device = false;  // something waits for a device: look again soon
    bool empty = false;
  };
  Progress look(CopyStreams& streams);

 private:
  enum class Lane : uint8_t { kOrdered, kSends, kFree };
  enum class Phase : uint8_t { kQueued, kLoading, kLoaded, kExchanging, kStoring, kDone };
  static constexpr size_t kLanes = 3;
  struct Item {
    std::shared_ptr<OpState> state;    // its caller's
    Operation operation;               // moved from once it is handed over
    std::shared_ptr<StagedSide> side;  // null: host memory
    Lane lane = Lane::kFree;
    uint64_t number = 0;
    Phase phase = Phase::kQueued;
    bool handed_over = false;
    bool told_wait = false;
    bool copies = false;  // a copy was enqueued, and is not known to be done
    std::shared_ptr<c10::Event> begun{};
    std::shared_ptr<c10::Event> copied{};
    std::shared_ptr<void> tensors{};      // their owners
    std::shared_ptr<OpState> exchange{};  // the CPU engine's state of it
  };
  using Items = std::list<Item>;
  struct Look;  // one look()

  static Lane laneOf(const Operation& operation);
  bool isBehindOthers(Lane lane);  // of those that were taken
  void noteBegun(Item& item);
  bool step(Items::iterator item, Look& look);
  bool guardedStep(Items::iterator item, Look& look);
  bool mayLoad(Items::iterator item, Look& look);
  // These return true.
  bool load(Item& item, Look& look);
  bool endLoad(Item& item);
  bool handOver(Item& item);
  bool store(Item& item, Look& look);
  bool finish(Item& item, FailurePtr failure);
  void failFor(const Item& item, const std::string& why);
  FailurePtr whyOver() const;

  const std::shared_ptr<Communicator> host_;
  const std::shared_ptr<Lifecycle> lifecycle_;
  const std::shared_ptr<const DevicePlatform> platform_;
  const std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();

  Items items_;  // the staging thread's
  Items kept_;   // likewise: the device cannot tell whether it is done with them

  Outstanding outstanding_;
  Mutex mutex_;
  Items incoming_ GUARDED_BY(mutex_);
  std::array<size_t, kLanes> waiting_ GUARDED_BY(mutex_){};  // not handed over, by lane
};

}  // namespace torchft_ext
