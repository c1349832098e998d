// One NCCL communicator: of a generation's ranks on one device, or of a pair of them.
//
// States: new -> initialising -> ready -> closed -> cut -> gone; from each of the first three
// straight to closed.
//   closed  its generation is over (or it is being retired): no call into NCCL begins any more
//   cut     revoked or aborted, so that its kernels end and streams get on; or given up
//   gone    NCCL has freed it
// Once NCCL is through with its finalize it is at rest: nothing more of it comes into a stream.
//
// Non-blocking: calls return at once, and NCCL goes on in threads of its own until asyncError()
// says that it is through. Blocking: calls return when that is so, and NCCL needs no thread; what
// may have to wait for peers there (initialisation, the first call of each shape) is called on a
// thread beside the issuing one, which has a deadline and the wait hook.
//
// Owner: its generation until it is closed, then the reaper until it is gone; operations under way
// hold it too. Destruction calls nothing: whoever owns it last has seen it gone, or has reported
// why not. Threads: the issuing thread (one at a time per generation) initialises and calls, or has
// that done beside it; the poller asks for asynchronous errors; the reaper cuts. All calls into
// NCCL go through the gate, but for the abort of a blocking one with someone inside (reap_batch.h).
// close() and what only reads: any thread, never blocks.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/control_communicator.h"
#include "comm/lifecycle.h"
#include "device/on_device.h"
#include "nccl/call_gate.h"
#include "nccl/call_threads.h"
#include "nccl/comm_memory.h"
#include "nccl/known_shapes.h"
#include "nccl/nccl_platform.h"
#include "nccl/peers_left.h"

namespace torchft_ext {

struct DeviceCommSetup {
  std::shared_ptr<const NcclPlatform> platform;
  std::shared_ptr<Lifecycle> lifecycle;
  c10::Device device;
  int rank = 0;
  int size = 1;
  std::string name;  // "dp0 generation 3 cuda:0"
  bool high_priority = false;
  int peer = -1;                            // the generation's rank at the other end; -1: all ranks
  std::shared_ptr<const PeersLeft> left{};  // null: nobody leaves
  std::shared_ptr<CallThreads> calls{};     // of a blocking one; null: it is non-blocking
  std::weak_ptr<ControlCommunicator>
      control{};  // by which the generation's members hear of failures
};

class DeviceComm : public std::enable_shared_from_this<DeviceComm> {
 public:
  explicit DeviceComm(DeviceCommSetup setup);

  const DeviceCommSetup& setup() const { return setup_; }
  NcclApi& api() const { return *setup_.platform->nccl; }
  const c10::Stream& stream() const { return *stream_; }  // its own
  bool blocking() const { return setup_.calls != nullptr; }
  bool ready() const { return ready_.load(std::memory_order_acquire); }
  bool closed() const { return gate_.closed(); }
  bool cut() const { return cut_.load(std::memory_order_acquire); }
  bool captured() const { return captured_.load(std::memory_order_acquire); }

  // ---- issuing thread

  // This process made one of its ids, and so NCCL's root for it. Before initialise().
  void madeRoot(const NcclUniqueId& id);
  // Blocks until NCCL says that it is ready. False: the generation is over (and has failed, if this
  // call is what ended it), or the deadline has passed. The wait hook may throw.
  bool initialise(const std::vector<NcclUniqueId>& ids, Deadline deadline);
  // Of two ranks: sends nothing and receives nothing, in one group on both. NCCL would connect only
  // the direction of the first call, and where both ranks send first, each takes the other's
  // direction for its own (2.28.9, run).
  bool connectBothWays(Deadline deadline);
  // Of a blocking one: waits for a call beside this thread. nullopt: the generation is over (a
  // member that leaves and is needed ends it, after the grace), or the deadline has passed.
  std::optional<NcclResult> awaitCall(CallThreads::Call& call, Deadline deadline);
  // Of calls that were made before.
  KnownShapes& shapes() { return shapes_; }
  // To be called inside the gate.
  NcclComm handle() const { return handle_; }
  CallGate& gate() { return gate_; }
  // kSuccess: it is quiet and sound. Inside the gate.
  NcclResult state() const;
  // What is registered in it. Inside the gate, or by the reaper; see there.
  CommMemory& memory() { return memory_; }
  // Waits until NCCL is no longer at work on this communicator's last call. False: as above. A
  // member that leaves meanwhile and is needed ends the generation, after the grace.
  bool settle(Deadline deadline);
  // Fails the generation: in NCCL's words, or where those are that a peer is gone, in those of
  // whoever knows more, which may take 200 ms.
  void fail(NcclResult result, const std::string& doing);
  // An operation of it goes into the graph that is being captured on this stream.
  void markCaptured(const c10::Stream& stream);
  // Whether one of those captures has not ended.
  bool captureIsOpen(const CudaApi& cuda);
  // One byte on the device, for barriers; kept as long as anyone holds it.
  std::shared_ptr<void> scratch();

  // ---- poller

  // Asks for an asynchronous error, unless someone is calling; an error fails the generation, that
  // a peer is gone only once it has been known for 200 ms (fail()).
  void lookForError();

  // ---- any thread

  void close() { gate_.close(); }
  // Waits until it is cut, or NCCL has freed it. False: not by the deadline.
  bool awaitCut(Deadline deadline);
  bool awaitGone(Deadline deadline);
  bool gone() const;
  // Whether NCCL enqueues nothing more for it: at rest, or gone.
  bool awaitRest(Deadline deadline);
  bool atRest() const;

  // ---- reaper, once the gate is closed, and empty but for what the last two say

  void markCut();
  void markAtRest();
  void markGone();
  // Of a blocking one with someone inside, where handle() is not to be read: what an abort is told,
  // once there is one.
  bool handleIsKnown() const { return handle_known_.load(std::memory_order_acquire); }
  NcclComm knownHandle() const { return known_handle_; }
  // By which the generation's members can be told of its failure. Kept from when its abort is asked
  // for until it is taken, since the generation's owner may go meanwhile. Null: it has gone.
  void keepControl();
  std::shared_ptr<ControlCommunicator> takeControl();
  // The id that this process made for it, where other ranks may still be awaited under it.
  std::optional<NcclUniqueId> abandonedRoot() const;

 private:
  NcclResult beginInit(const std::vector<NcclUniqueId>& ids, Deadline deadline);
  NcclResult initInGroup(const std::vector<NcclUniqueId>& ids, Deadline deadline);
  NcclResult exchangeNothing(void* byte, Deadline deadline);
  bool through(const std::function<NcclResult()>& call, const char* doing, Deadline deadline);
  // nullopt: as of awaitCall().
  std::optional<NcclResult> beside(const std::function<NcclResult()>& call, Deadline deadline);
  bool betterCauseComes();    // blocks
  bool betterCauseMayCome();  // does not
  bool blameLeaver();  // true: a member that is needed has left, and the generation has failed
  void tell(NcclResult result, const std::string& doing);

  const DeviceCommSetup setup_;
  const std::shared_ptr<const c10::Stream> stream_;
  CallGate gate_;
  // Whoever is inside the gate, or closed and emptied it. NCCL may write it until init is through
  // or the communicator is gone (nccl_api.h): so it is here, not on the stack of who initialises.
  NcclComm handle_ = nullptr;
  CommMemory memory_;                         // the issuing thread's, inside the gate
  std::shared_ptr<c10::DataPtr> scratch_;     // the issuing thread's
  std::vector<c10::Stream> capture_streams_;  // the issuing thread's
  KnownShapes shapes_;                        // the issuing thread's
  NcclComm known_handle_ = nullptr;           // written inside the gate, before the next
  std::atomic<bool> handle_known_{false};
  std::atomic<bool> ready_{false};     // written by the issuing thread
  std::atomic<bool> cut_{false};       // written by the reaper, under mutex_
  std::atomic<bool> captured_{false};  // written by the issuing thread
  mutable Mutex mutex_;
  CondVar changed_;
  bool at_rest_ GUARDED_BY(mutex_) = false;  // gone included
  bool gone_ GUARDED_BY(mutex_) = false;
  std::optional<NcclUniqueId> root_ GUARDED_BY(mutex_);
  std::shared_ptr<ControlCommunicator> control_ GUARDED_BY(mutex_);
  std::optional<Clock::time_point> remote_error_at_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
