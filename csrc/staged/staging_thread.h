// The process's thread "ft-staging": it looks at the queues of all communicators whose operations
// go through host memory, and runs their copies.
//
// It looks every 20 us while operations move on, down to every 1 ms while none does, and sleeps
// while no queue waits for a device. It never waits for a device: it asks events.
//
// Owner: the process; made with the first operation, anew after stop(). Threads: any; nothing but
// stop() blocks. A forked child gets one of its own.
#pragma once

#include <cstdint>
#include <memory>

#include "base/deadline.h"

namespace torchft_ext {

class StagingQueue;

struct StagingCounts {
  int64_t operations = 0;  // that have gone through host memory, with success
  int64_t pending = 0;     // in a queue
  int64_t bytes_loaded = 0;
  int64_t bytes_stored = 0;

  StagingCounts& operator+=(const StagingCounts& more) {
    operations += more.operations;
    pending += more.pending;
    bytes_loaded += more.bytes_loaded;
    bytes_stored += more.bytes_stored;
    return *this;
  }
};

class StagingThread {
 public:
  // Before anything is handed to it. Throws std::system_error where the system has no thread left.
  static void start();
  // The queue has something new. The thread keeps it until it is empty.
  static void attend(std::shared_ptr<StagingQueue> queue);
  static void wake();  // something may go on; nothing where there is no thread
  static bool isSelf();
  static void count(const StagingCounts& more);
  static StagingCounts counts();
  // False: it had not ended by the deadline, and is counted as stuck.
  static bool stop(Deadline deadline);
};

}  // namespace torchft_ext
