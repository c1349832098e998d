// A group's counts as the public headers give them.
#pragma once

#include <utility>

#include "comm/group.h"
#include "torchft_ext/comm.h"

namespace torchft_ext {

inline CommStats commStatsOf(GroupStats counted) {
  CommStats stats;
  stats.generations = counted.generations;
  stats.failed_configures = counted.failed_configures;
  stats.operations = counted.operations;
  stats.bytes_sent = counted.bytes_sent;
  stats.bytes_received = counted.bytes_received;
  stats.last_failure = std::move(counted.last_failure);
  stats.why_over_sockets = std::move(counted.why_over_sockets);
  stats.waited_for.assign(counted.waited_for.begin(), counted.waited_for.end());
  for (auto& [phase, took] : counted.last_configure) stats.last_configure.emplace_back(phase, took);
  return stats;
}

}  // namespace torchft_ext
