#include "c10d/environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cmath>
#include <cstdlib>

namespace torchft_ext {
namespace {

constexpr std::chrono::hours kLongestHeartbeat{24};
constexpr int kPortsPerProcess = 3;  // connections, main and backup liveness connections

bool holdsEnough(const PortRange& range) {
  const bool any_port = range.last == 0;
  return any_port || range.last - range.first + 1 >= kPortsPerProcess;
}

// An empty variable counts as unset, as shells have it.
std::optional<std::string> read(const char* name) {
  const char* value = std::getenv(name);  // nothing here calls setenv
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::chrono::milliseconds parseSeconds(const char* name, const std::string& text) {
  constexpr double kMost = std::chrono::duration<double>(kLongestHeartbeat).count();
  double seconds = -1;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, seconds);
  const bool good = error == std::errc() && stopped == end && std::isfinite(seconds) &&
                    seconds >= 0 && seconds <= kMost;
  TORCH_CHECK_VALUE(good, name, ": expected seconds from 0 (off) to ", kMost, ", found '", text,
                    "'");
  return std::chrono::milliseconds(std::llround(std::ceil(seconds * 1000)));
}

bool parseSwitch(const char* name, const std::string& text) {
  TORCH_CHECK_VALUE(text == "0" || text == "1", name, ": expected '0' or '1', found '", text, "'");
  return text == "1";
}

}  // namespace

void checkHeartbeat(const std::string& source, std::chrono::milliseconds limit) {
  // Beats are some 20 ms apart at least, and a busy machine delays them by more than that.
  constexpr std::chrono::milliseconds kLeast{100};
  TORCH_CHECK_VALUE(limit.count() == 0 || limit >= kLeast, source,
                    ": expected zero (off) or at least ", kLeast.count(), " ms, found ",
                    limit.count(), " ms");
  TORCH_CHECK_VALUE(limit <= kLongestHeartbeat, source, ": expected at most ",
                    kLongestHeartbeat.count(), " hours (zero: off), found ",
                    std::chrono::duration_cast<std::chrono::hours>(limit).count(), " hours");
}

PortRange parsePortRange(const std::string& source, const std::string& text) {
  const std::optional<PortRange> range = PortRange::parse(text);
  TORCH_CHECK_VALUE(range && holdsEnough(*range), source, ": expected a range of at least ",
                    kPortsPerProcess, " ports such as '7000-7100', found '", text, "'");
  return *range;
}

Environment readEnvironment() {
  Environment environment;
  for (const char* name : {"TORCHFT_EXT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    if (environment.interface) break;
    environment.interface = read(name);
    if (environment.interface) environment.interface_variable = name;
  }
  if (const auto text = read("TORCHFT_EXT_PORT_RANGE")) {
    environment.ports = parsePortRange("TORCHFT_EXT_PORT_RANGE", *text);
  }
  if (const auto text = read("TORCHFT_EXT_LOCAL_SOCKETS")) {
    environment.local_sockets = parseSwitch("TORCHFT_EXT_LOCAL_SOCKETS", *text);
  }
  if (const auto text = read("TORCHFT_EXT_HEARTBEAT")) {
    environment.heartbeat = parseSeconds("TORCHFT_EXT_HEARTBEAT", *text);
    checkHeartbeat("TORCHFT_EXT_HEARTBEAT", *environment.heartbeat);
  }
  if (const auto text = read("TORCHFT_EXT_NAN_CHECK")) {
    environment.nan_check = parseSwitch("TORCHFT_EXT_NAN_CHECK", *text);
  }
  if (const auto text = read("TORCHFT_EXT_NCCL_BLOCKING")) {
    environment.nccl_blocking = parseSwitch("TORCHFT_EXT_NCCL_BLOCKING", *text);
  }
  return environment;
}

}  // namespace torchft_ext
