// The TORCHFT_EXT_* variables of groups, read once per call; those of shared memory are read by
// host/shared_environment.h, and other engines read their own. A bad value is a ValueError that
// names the variable, what was expected and what was found. Any thread (as far as nobody changes
// the environment meanwhile).
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "net/socket_address.h"

namespace torchft_ext {

struct Environment {
  std::optional<std::string> interface;  // TORCHFT_EXT_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME
  std::optional<std::string> interface_variable;       // which of the two it came from
  std::optional<PortRange> ports;                      // TORCHFT_EXT_PORT_RANGE
  std::optional<bool> local_sockets;                   // TORCHFT_EXT_LOCAL_SOCKETS, 0 or 1
  std::optional<std::chrono::milliseconds> heartbeat;  // TORCHFT_EXT_HEARTBEAT, seconds; 0: off
  std::optional<std::chrono::milliseconds> ask_after;  // TORCHFT_EXT_ASK_AFTER, seconds; 0: off
  std::optional<bool> nan_check;                       // TORCHFT_EXT_NAN_CHECK, 0 or 1
};
Environment readEnvironment();

// ValueError naming `source` unless it is zero (off) or long enough for beats to arrive in time.
void checkHeartbeat(const std::string& source, std::chrono::milliseconds limit);
// ValueError naming `source` unless it is zero (off) to a day.
void checkAskAfter(const std::string& source, std::chrono::milliseconds time);
// ValueError naming `source` where the text is no port range.
PortRange parsePortRange(const std::string& source, const std::string& text);

}  // namespace torchft_ext
