// The CPU engine's communicator, with a queue before it in which operations on device tensors wait
// for their copies (staging_queue.h). Operations on host memory go past the queue where nothing in
// it is before them in an order that they share.
//
// Owner: the group's current generation. Threads: any. issue() never blocks. After the lifecycle
// failed: as staging_queue.h says of each state. Destruction never waits: a generation with
// operations in the queue fails, an idle one ends as the CPU engine's does.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "device/device_platform.h"
#include "staged/staging_queue.h"

namespace torchft_ext {

class StagedCommunicator : public Communicator {
 public:
  StagedCommunicator(std::shared_ptr<Communicator> host, std::shared_ptr<Lifecycle> lifecycle,
                     std::shared_ptr<const DevicePlatform> platform);
  ~StagedCommunicator() override;

  void issue(std::shared_ptr<OpState> state, Operation operation) override;
  bool awaitIssued(Deadline deadline) override;
  bool drain(Deadline deadline) override;
  bool leave(Deadline deadline) override;
  bool leaveForAnother(Deadline deadline) override;
  uint64_t bytesSent() const override { return host_->bytesSent(); }
  uint64_t bytesReceived() const override { return host_->bytesReceived(); }
  std::vector<Duration> waitedFor() const override { return host_->waitedFor(); }
  std::string whyOverSockets() const override { return host_->whyOverSockets(); }

 private:
  const std::shared_ptr<Communicator> host_;
  const std::shared_ptr<Lifecycle> lifecycle_;
  const std::shared_ptr<StagingQueue> queue_;
  const Lifecycle::Subscription subscription_;
};

}  // namespace torchft_ext
