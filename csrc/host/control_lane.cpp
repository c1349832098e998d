#include "host/control_lane.h"

#include <utility>

namespace torchft_ext {
namespace {

Receipt refuse(std::string why) {
  Receipt receipt;
  receipt.why = std::move(why);
  return receipt;
}

}  // namespace

Receipt ControlLane::onHeader(const FrameHeader& header) {
  switch (header.type) {
    case FrameType::kBarrier:
    case FrameType::kFailed:
    case FrameType::kGoodbye: {
      Receipt text;
      text.kind = Receipt::Kind::kText;
      return text;
    }
    case FrameType::kAnnounce:
    case FrameType::kClear:
    case FrameType::kMessage:
      if (Messages* messages = events_.messages()) return messages->onHeader(rank_, header);
      return refuse("a message before the epoch has formed");
    default:
      return refuse("a frame of type " + std::to_string(static_cast<int>(header.type)) +
                    " on a control lane");
  }
}

void ControlLane::onFrame(const FrameHeader& header) {
  if (Messages* messages = events_.messages()) messages->onFrame(rank_, header);
}

void ControlLane::onText(const FrameHeader& header, std::string payload) {
  events_.onControlText(rank_, header, payload);
}

void ControlLane::onBroken(const std::string& /*why*/, bool /*clean*/) {
  events_.onControlEnded(rank_);
}

}  // namespace torchft_ext
