#include "host/network_limits.h"

#include <optional>

namespace torchft_ext {
namespace {

constexpr int kPortsPerProcess = 3;  // connections, main and backup liveness connections

bool holdsEnough(const PortRange& range) {
  const bool any_port = range.last == 0;
  return any_port || range.last - range.first + 1 >= kPortsPerProcess;
}

}  // namespace

std::string heartbeatProblem(std::chrono::milliseconds limit) {
  if (limit.count() != 0 && limit < kShortestHeartbeat) {
    return ": expected zero (off) or at least " + std::to_string(kShortestHeartbeat.count()) +
           " ms, found " + std::to_string(limit.count()) + " ms";
  }
  if (limit > kLongestHeartbeat) {
    return ": expected at most " + std::to_string(kLongestHeartbeat.count()) +
           " hours (zero: off), found " +
           std::to_string(std::chrono::duration_cast<std::chrono::hours>(limit).count()) + " hours";
  }
  return {};
}

std::string askAfterProblem(std::chrono::milliseconds time) {
  if (time.count() >= 0 && time <= kLongestAskAfter) return {};
  return ": expected 0 (off) to " + std::to_string(kLongestAskAfter.count()) + " hours, found " +
         std::to_string(time.count()) + " ms";
}

std::variant<PortRange, std::string> portRangeOf(const std::string& text) {
  const std::optional<PortRange> range = PortRange::parse(text);
  if (range && holdsEnough(*range)) return *range;
  return ": expected a range of at least " + std::to_string(kPortsPerProcess) +
         " ports such as '7000-7100', found '" + text + "'";
}

}  // namespace torchft_ext
