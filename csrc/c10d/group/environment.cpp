#include "c10d/group/environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <variant>

#include "host/network_limits.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::hours kLongestHeartbeat{24};
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
  const std::string problem = heartbeatProblem(limit);
  TORCH_CHECK_VALUE(problem.empty(), source, problem);
}

void checkAskAfter(const std::string& source, std::chrono::milliseconds time) {
  const std::string problem = askAfterProblem(time);
  TORCH_CHECK_VALUE(problem.empty(), source, problem);
}

PortRange parsePortRange(const std::string& source, const std::string& text) {
  const auto range = portRangeOf(text);
  const auto* problem = std::get_if<std::string>(&range);
  TORCH_CHECK_VALUE(problem == nullptr, source, *problem);
  return std::get<PortRange>(range);
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
  if (const auto text = read("TORCHFT_EXT_ASK_AFTER")) {
    environment.ask_after = parseSeconds("TORCHFT_EXT_ASK_AFTER", *text);
  }
  if (const auto text = read("TORCHFT_EXT_NAN_CHECK")) {
    environment.nan_check = parseSwitch("TORCHFT_EXT_NAN_CHECK", *text);
  }
  return environment;
}

}  // namespace torchft_ext
