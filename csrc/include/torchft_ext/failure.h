// Why a generation or an operation failed: a value that travels between threads, and becomes an
// exception only at the public surface. Immutable once shared. Knows nothing of torch or Python.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace torchft_ext {

// The kind decides what the caller must do next. The numbers travel on the wire: append only.
enum class FailureKind : uint8_t {
  kPeerLost = 1,  // a process died or froze: begin a generation without it
  kPeerLeft = 2,  // a process left cleanly before doing its part: begin a generation without it
  kConnectionLost = 3,  // two living processes cannot reach each other: begin a new generation
  kTimeout = 4,         // an operation or configure ran past its deadline: begin a new generation
  kAborted = 5,         // somebody called abort(): begin a new generation
  kStoreLost = 6,       // the store cannot be reached: provide another one
  kMismatch = 7,    // ranks issued different operations: fix the program, begin a new generation
  kRendezvous = 8,  // the generation could not be formed (duplicate rank, refused peer): see detail
  kInternal = 9,    // a fault in this library: report it
};
const char* toString(FailureKind kind);

// Which process caused it, as far as is known.
struct Cause {
  int rank = -1;        // rank in the failed generation; -1: not known
  int other_rank = -1;  // kConnectionLost: the far end of the lost connection; else -1
  std::string host;
  int64_t pid = -1;
  std::string how;  // one clause: "its process ended", "abort() was called: ..."
};

// How a group belongs to an elastic job.
enum class InJob {
  kNo,
  kFollows,    // its generations are those of the job's views; recover() begins them
  kOfOneView,  // it was made beside such a group, and has no further generation
  kMadeAnew,   // the same, but a rule of the job makes it: recover() makes another one in its place
};

struct Failure {
  FailureKind kind = FailureKind::kInternal;
  Cause cause;

  // Where it was noticed: this rank's view.
  std::string group;  // the group's name
  int64_t generation = -1;
  int rank = -1;
  int size = 0;
  std::string op;    // "allreduce", "configure", ...; empty: between operations
  int64_t seq = -1;  // the operation's sequence number in its generation
  std::chrono::nanoseconds elapsed{0};
  std::chrono::nanoseconds limit{0};  // zero: there was none
  // configure() cannot follow: the group was shut down, or could not be made. This applies to this
  // process only, and is not sent to others.
  bool needs_new_group = false;
  InJob in_job = InJob::kNo;                   // like the fields below, of this process only
  std::chrono::steady_clock::time_point at{};  // when the generation failed; the epoch: it has not
  // For how long the lost process had sent nothing by then; zero: not known.
  std::chrono::nanoseconds silent_for{0};

  // One line: operation, group, rank/size, generation, who, how, elapsed and limit, and the next
  // step.
  std::string describe() const;
};

// "0.013 s", "30 s": as messages give times.
std::string formatSeconds(std::chrono::nanoseconds duration);

using FailurePtr = std::shared_ptr<const Failure>;  // null: no failure

}  // namespace torchft_ext
