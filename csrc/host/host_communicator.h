// The host engine's communicator: posts to the generation on the network thread, and waits for it.
// Owner: the group. Threads: any. Destruction never waits: the generation fails and closes on its
// thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/control_communicator.h"
#include "host/host_generation.h"

namespace torchft_ext {

class HostCommunicator : public ControlCommunicator {
 public:
  // keep_alive: the engine, whose loop outlives the generation.
  HostCommunicator(EventLoop& loop, std::shared_ptr<HostGeneration> generation,
                   std::shared_ptr<Lifecycle> lifecycle, std::shared_ptr<void> keep_alive);
  ~HostCommunicator() override;

  void issue(std::shared_ptr<OpState> state, Operation operation) override;
  void onPeerLeft(const OnPeerLeft& told) override;
  bool tellOfFailure(Deadline deadline) override;
  bool whenNoticesRead(std::function<void()> then) override;
  bool drain(Deadline deadline) override;
  bool leave(Deadline deadline) override;
  bool leaveForAnother(Deadline deadline) override;
  uint64_t bytesSent() const override;
  uint64_t bytesReceived() const override;
  std::vector<Duration> waitedFor() const override { return generation_->waitedFor(); }
  std::string whyOverSockets() const override { return why_over_sockets_; }

 private:
  bool depart(HostGeneration::GoodbyeKind goodbye_kind, Deadline deadline);

  EventLoop& loop_;
  std::shared_ptr<HostGeneration> generation_;  // released on the loop
  const std::shared_ptr<SharedLane> lane_;      // null: the generation has none
  const std::string why_over_sockets_;
  const std::shared_ptr<Lifecycle> lifecycle_;
  std::shared_ptr<void> keep_alive_;  // released last, never on the loop
};

}  // namespace torchft_ext
