// What the simulator is told to do wrong, and what it saw done wrong.
//
// A fault is one line of text:  ACTION POINT [key=value ...]
//   points   a call (init, allreduce, broadcast, reduce, allgather, reduce_scatter, send, recv,
//            finalize, destroy, abort, revoke, unique_id, group_end, register, deregister), one
//            about what another process is lent (lend: memory, lend_event, record), or "any"
//   hang         the operation stays on its stream until abort or revoke, whoever comes; with ms=,
//                for that much longer, and then writes junk into its output; init: stays in
//                progress for good
//   delay        the operation takes ms= longer on its stream; init: ready ms= later
//   fail         the call returns code= at once; register with code=0: a success without a handle
//   async_error  while the operation runs, its communicator gets the asynchronous error code=, and
//                the operation stays until abort or revoke
//   in_progress  the call returns kInProgress, and so do the next polls= asyncError() calls; -1
//                stands for all until it is aborted; a blocking communicator's call takes as long
//   block        the call does not return for ms= (-1: until clear); abort: what frees it does not,
//                the group's end where the version defers that
// keys: rank= (of the communicator; default any), count= (how often; default 1, -1: always), code=
// (default 6), polls= (default 3), ms= (default -1 for block, 10 for delay).
// "version 22605" sets the library's version. "clear" removes all faults and lets blocked calls go.
//
// Owner: the process. Threads: any. Nothing blocks but pause().
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace torchft_ext::sim {

enum class FaultAction { kHang, kDelay, kFail, kAsyncError, kInProgress, kBlock };

struct Fault {
  FaultAction action = FaultAction::kHang;
  std::string point;
  int rank = -1;
  int count = 1;
  int code = 6;
  int polls = 3;
  int ms = -1;
};

class Faults {
 public:
  static Faults& instance();

  // Throws std::invalid_argument for text that is none.
  void inject(const std::string& line);
  // The fault that strikes this call, used up by it.
  std::optional<Fault> take(FaultAction action, const std::string& point, int rank);
  // Sits in an injected "block" of this call, if there is one.
  void pause(const std::string& point, int rank);
  bool armed(const std::string& point) const;  // a fault for it waits
  int version() const;

  // Misuse of the library or the device: tests assert that there is none.
  void violation(const std::string& what);
  std::vector<std::string> violations() const;
  // Named numbers: "inits", "allreduce", ...
  void count(const std::string& name, int64_t delta = 1);
  // The number by that name; 0 where nothing was counted.
  int64_t counted(const std::string& name) const;
  std::map<std::string, int64_t> counts() const;
  // Faults, violations and counts that are sums go; what is alive stays counted ("live_...").
  void reset();

 private:
  mutable Mutex mutex_;
  CondVar cleared_;
  std::vector<Fault> faults_ GUARDED_BY(mutex_);
  uint64_t clears_ GUARDED_BY(mutex_) = 0;
  int version_ GUARDED_BY(mutex_) = 22809;
  std::vector<std::string> violations_ GUARDED_BY(mutex_);
  std::map<std::string, int64_t> counts_ GUARDED_BY(mutex_);
};

inline void violation(const std::string& what) {
  Faults::instance().violation(what);
}

// Counts, violations and what is alive, as JSON:
// {"violations": [...], "counts": {...}, "live_communicators": n, ...}.
std::string report();

}  // namespace torchft_ext::sim
