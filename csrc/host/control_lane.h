// Receives one peer's control lane, and sorts it: what the epoch is told, and its messages.
//
// Owner: HostEpoch. Threads: loop only. Never called after the link's close().
#pragma once

#include <string>

#include "host/link.h"
#include "host/messages.h"

namespace torchft_ext {

class ControlLane : public LinkReceiver {
 public:
  class Events {
   public:
    virtual ~Events() = default;
    virtual Messages* messages() = 0;  // null: the epoch has not formed
    virtual void onControlText(int rank, const FrameHeader& header, const std::string& payload) = 0;
    virtual void onControlEnded(int rank) = 0;
  };

  ControlLane(Events& events, int rank) : events_(events), rank_(rank) {}

  Receipt onHeader(const FrameHeader& header) override;
  void onFrame(const FrameHeader& header) override;
  void onText(const FrameHeader& header, std::string payload) override;
  void onBroken(const std::string& why, bool clean) override;

 private:
  Events& events_;
  const int rank_;
};

}  // namespace torchft_ext
