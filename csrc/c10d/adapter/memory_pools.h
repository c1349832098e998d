// A group's memory pools that are registered with its devices' library: torch's
// register_mem_pool() and deregister_mem_pool().
//
// Owner: the backend. Threads: any. Both methods block up to the group's timeout; a signal's
// handler may throw out of them. ValueError for a pool that is not registered or names no device;
// NotImplementedError where the group's engine registers none (that of the CPU); RuntimeError for a
// group that was shut down; DistBackendError where its library refuses, with the generation
// unharmed; CommTimeoutError where it is not done within the group's timeout.
#pragma once

#include <memory>

#include "c10d/group/devices.h"
#include "comm/group.h"
#include "device/pool_registry.h"

namespace torchft_ext {

class MemoryPools {
 public:
  // registry: null where the engine registers none.
  MemoryPools(std::shared_ptr<Group> group, const Devices& devices,
              std::shared_ptr<PoolRegistry> registry)
      : group_(std::move(group)), devices_(devices), registry_(std::move(registry)) {}

  // In this generation and all to come.
  void add(MemoryPool pool);
  // Waits for everything issued, as the group's check() does, and fails the generation where that,
  // or the library, takes longer.
  void remove(const PoolId& id);
  const std::shared_ptr<PoolRegistry>& registry() const {
    return registry_;
  }              // null: there is none
  void close();  // forgets all pools; never blocks

 private:
  void checkServed(const char* operation) const;
  void throwUnlessDone(const char* operation, const MemoryOutcome& outcome, Clock::time_point began,
                       Duration limit) const;

  const std::shared_ptr<Group> group_;
  const Devices devices_;
  const std::shared_ptr<PoolRegistry> registry_;
};

}  // namespace torchft_ext
