// The NCCL engine's communicator: a generation's control communicator with NCCL beside it.
// Operations on host memory go to the former, those on device memory to the latter.
//
// Owner: the group's current generation. Threads: any; operations on devices are issued by one
// thread at a time, whose turn it is (comm/issue_order.h). States follow the lifecycle:
//   forming, active  operations run; communicators are made as they are needed
//   failed           whoever fails the lifecycle hands all NCCL communicators to the reaper, on its
//                    own thread and without waiting; they are cut within milliseconds, and then
//                    everything under way is completed with the failure
//   ended            after leave(): they were finalized, or aborted where that took too long
// issue() blocks while a communicator is made (all its ranks have to come) and while NCCL is at
// work on the calls; bounded by the operation's deadline, ended by the generation's end.
// Destruction never waits: the generation fails.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "nccl/launch.h"

namespace torchft_ext {

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(GenerationComms::Setup setup, std::shared_ptr<NcclThreads> threads);
  ~NcclCommunicator() override;

  // Makes the communicator of the bound device, together with all other ranks. Before anything is
  // issued. False: the generation is over, or the deadline has passed.
  bool bindDevice(c10::Device device, Deadline deadline);

  void issue(std::shared_ptr<OpState> state, Operation operation) override;
  void issueTogether(std::vector<Issue> issues) override;
  bool awaitIssued(Deadline deadline) override;
  bool drain(Deadline deadline) override;
  bool leave(Deadline deadline) override;
  bool leaveForAnother(Deadline deadline) override;
  uint64_t bytesSent() const override { return control_->bytesSent(); }
  uint64_t bytesReceived() const override { return control_->bytesReceived(); }
  std::vector<Duration> waitedFor() const override { return control_->waitedFor(); }
  std::string whyOverSockets() const override { return control_->whyOverSockets(); }

 private:
  using Comms = std::vector<std::shared_ptr<DeviceComm>>;
  Comms takeIdle();
  Comms retireAll(Deadline deadline);
  bool awaitDrained(Deadline deadline);
  bool lookForUpdates(Deadline deadline);  // what members had told before this call has been heard

  const std::shared_ptr<ControlCommunicator> control_;
  const Launch::Context context_;
  const Lifecycle::Subscription subscription_;
};

}  // namespace torchft_ext
