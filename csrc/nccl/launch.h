// Operations that begin together, from arguments to the device: finds their communicators, orders
// their streams, makes NCCL's calls in one group, and hands each over to the poller.
//
// On blocking communicators, calls that NCCL may first have to connect to peers for are made on a
// thread beside (device_comm.h), with copies of their arguments; all others here.
//
// Owner: the stack of the issuing thread; one at a time per communicator. Every operation given to
// it is completed, or in the poller's hands, when run() returns or throws. run() blocks in calls of
// a known shape on blocking communicators as long as NCCL does (an abort ends its waits for peers);
// otherwise while a communicator is made or while NCCL is at work on the calls, until the first
// deadline at most, and ends with the generation.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/outstanding.h"
#include "device/stream_side.h"
#include "nccl/device_call.h"
#include "nccl/generation_comms.h"
#include "nccl/nccl_threads.h"
#include "nccl/peers_left.h"
#include "nccl/stream_tails.h"

namespace torchft_ext {

class Launch {
 public:
  struct Context {
    std::shared_ptr<const NcclPlatform> platform;
    std::shared_ptr<NcclThreads> threads;
    std::shared_ptr<Lifecycle> lifecycle;
    std::shared_ptr<GenerationComms> comms;
    std::shared_ptr<Outstanding> outstanding;
    std::shared_ptr<PeersLeft> left;
    std::shared_ptr<StreamTails> tails;
  };

  Launch(const Context& context, std::vector<Communicator::Issue> issues);

  // Throws std::invalid_argument where NCCL cannot do one of them: nothing was sent, the generation
  // is unharmed. Throws what the wait hook throws: the generation has failed.
  void run();

 private:
  struct Op {
    Communicator::Issue issue;
    StreamSide* side = nullptr;
    uint64_t number = 0;
    int peer = -1;  // of send and recv
    std::shared_ptr<DeviceComm> comm{};
    std::shared_ptr<void> scratch{};
    std::shared_ptr<c10::Event> begun{};  // what the caller had enqueued before is through
    bool handed_over = false;             // to the poller: no longer ours to complete
  };
  enum class Called { kNothing, kDone, kInterrupted };

  void refuseUnsupported();
  void begin();
  bool everyoneIsThere();
  bool findComms();
  void checkCapture(const Op& op) const;
  void order(Op& op);
  Called call();
  DeviceCalls planned() const;
  bool mayConnect(const DeviceCalls& calls) const;
  NcclResult callHere(const DeviceCalls& calls);
  std::optional<NcclResult> callBeside(const DeviceCalls& calls);
  void load();
  bool settleAll();
  void handOver(Op& op);
  void handOverInterrupted();
  void watch(Op& op, bool interrupted);
  void recordEnd(Op& op);
  void recordEndOfFailed(Op& op);
  void noteEnd(StreamSide& side, std::shared_ptr<c10::Event> end) const;
  void complete(Op& op, FailurePtr failure);
  void completeAll();
  void interrupted(const char* how);
  void endIfLate(const Op& op);
  FailurePtr whyOver() const;
  std::shared_ptr<c10::Event> event(const Op& op, bool timed);

  const Context& context_;
  std::vector<Op> ops_;
  std::vector<const Op*> in_order_;                // by their communicators, alike on all ranks
  std::vector<std::shared_ptr<DeviceComm>> used_;  // each once
  Deadline deadline_ = Deadline::never();
  bool capturing_ = false;
  bool called_ = false;
  bool interrupted_ = false;
  bool loaded_ = false;  // what stands in for callers' tensors
};

}  // namespace torchft_ext
