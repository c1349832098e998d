// What a user may choose for an engine's network, and for what goes over it. Pure; any thread.
#pragma once

#include <chrono>
#include <string>
#include <variant>

#include "net/socket_address.h"

namespace torchft_ext {

// Beats are some 20 ms apart at least, and a busy machine delays them by more than that.
inline constexpr std::chrono::milliseconds kShortestHeartbeat{100};
inline constexpr std::chrono::hours kLongestHeartbeat{24};

inline constexpr std::chrono::hours kLongestAskAfter{24};

// What is wrong with it, as a message goes on after the name of what was given; empty: nothing.
std::string heartbeatProblem(std::chrono::milliseconds limit);
std::string askAfterProblem(std::chrono::milliseconds time);
// The range, or what is wrong with it.
std::variant<PortRange, std::string> portRangeOf(const std::string& text);

}  // namespace torchft_ext
