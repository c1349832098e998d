// What is registered in the simulated communicators, and where that is broken:
//   deregistering what is not registered in that communicator (a null handle too), or while its
//   operations run; ending one with a goodbye that has registrations; freeing memory that a live
//   one has registered.
// An abort takes a communicator's registrations with it, as the real one does.
//
// Owner: the process. Threads: any. Never blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/nccl_types.h"

namespace torchft_ext::sim {

class Registrations {
 public:
  // A handle of its own for each, that no other ever gets; counted in "live_registrations".
  static void* add(NcclComm comm, const void* data, size_t bytes);
  static bool remove(NcclComm comm, const void* handle);  // false: not registered there
  static void removeAll(NcclComm comm);
  static bool any(NcclComm comm);
  // Whether some of these bytes are registered in any communicator.
  static bool covers(uintptr_t address, size_t bytes);
};

}  // namespace torchft_ext::sim
