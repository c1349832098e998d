// The last operations of a group: a ring that is always on, and what is known of the generations
// that they belong to. Its readers:
//   issuedIn()   what other ranks are told that wait for this one (host/issue_report.h)
//   snapshots()  what dumps are made of (operation_dump.h)
//   totals()     what metrics count by kind
//   waits()      whom the group waits for now, for those who ask how an elastic job is
//
// Owner: the group, and its generations' lifecycles, which may outlive it. Threads: any. Entering
// an operation allocates nothing, and nothing here blocks, throws or takes the GIL. Its mutex is a
// leaf: it may be taken under the group's and under an operation's, and takes no other. A snapshot
// holds it while it copies the ring: some 0.1 ms for the usual capacity.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/identity.h"
#include "base/mutex.h"
#include "comm/operation.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

struct OperationRecord {
  enum class State : uint8_t { kScheduled, kStarted, kCompleted, kFailed };
  static constexpr size_t kMostWaitedFor = 4;

  uint64_t number;     // of the group's operations, from 1
  int64_t generation;  // as this group counts them
  int64_t seq;         // as errors give it; -1: of none
  // Of the generation's collectives that all ranks count alike, from 1. 0: a message, or issued by
  // a callback.
  uint64_t collective;
  // Of those on host memory alone, from 0: OpState::place().
  uint64_t place;
  OpKind kind;
  DType dtype;
  State state;
  bool on_device;
  uint8_t waiters;  // of waited_for
  int root;
  int peer;  // of messages; -1: any
  // The ranks that it waited for when its rank last asked, the first ones.
  std::array<int, kMostWaitedFor> waited_for;
  Shape input;
  Shape output;
  Clock::time_point issued;
  Clock::time_point started;  // the epoch: not yet
  Clock::time_point ended;    // likewise
};
// The ring is memory that the kernel gives zeroed, page by page as it is used.
static_assert(std::is_trivially_copyable_v<OperationRecord>);

struct GenerationRecord {
  struct Member {
    std::string host;
    int64_t pid = -1;
  };
  int64_t number = 0;
  std::string id;  // the same on all its members, and in no other generation
  int rank = 0;
  int size = 1;
  int first_rank = 0;  // this process's in the group's first generation
  std::vector<Member> members;
  FailurePtr failure;  // null: it has not failed
};

// Of all operations that a group has issued, by kind.
struct OperationTotals {
  std::array<uint64_t, kOpKinds> bytes{};  // of the larger side: the inputs, or the outputs
  // From issue to end, of those that have ended while the ring had them.
  std::array<Duration, kOpKinds> time{};
};

class OperationRecorder {
 public:
  static constexpr size_t kUsualCapacity = 2000;
  static constexpr size_t kMostCapacity = 100'000;
  static constexpr size_t kGenerationsKept = 8;
  // So many operations issuedIn() and waits() look back at most.
  static constexpr size_t kLookBack = 1000;

  // capacity: in operations; 0: no dump has any, and the ring is as long as questions need it.
  OperationRecorder(std::string group, size_t capacity);
  // TORCH_FR_BUFFER_SIZE, as torch reads it for its own recorder; kUsualCapacity without it.
  static size_t capacityFromEnvironment();

  bool dumps() const { return dumps_; }
  const std::string& group() const { return group_; }

  // Members and numbers of one that is about to be active.
  void begin(GenerationRecord generation) EXCLUDES(mutex_);
  void failed(int64_t generation, FailurePtr failure) EXCLUDES(mutex_);
  // Its number, for what follows. One after the other, in the order of issue.
  uint64_t issued(const Operation& operation, int64_t generation, int64_t seq, Clock::time_point at,
                  uint64_t place = kNoPlace) EXCLUDES(mutex_);
  // Nothing where the ring has gone round since.
  void started(uint64_t number, Clock::time_point at) EXCLUDES(mutex_);
  void waitedFor(uint64_t number, const std::vector<int>& ranks) EXCLUDES(mutex_);
  void ended(uint64_t number, bool failed, Clock::time_point at) EXCLUDES(mutex_);

  struct Issued {
    uint64_t collectives = 0;                 // that have a place
    std::optional<OperationRecord> at_place;  // nullopt: none yet, or it is forgotten
    std::optional<OperationRecord> last;      // of all operations; nullopt: none yet
  };
  // Of that generation: the collective at this place, and the last operation.
  Issued issuedIn(int64_t generation, uint64_t place) const EXCLUDES(mutex_);
  OperationTotals totals() const EXCLUDES(mutex_);
  // "allreduce #812 on 'dp0' has waited 5 s for rank 3 (host b, pid 812)": the one that has waited
  // longest. Empty: none waits for members, or nobody has asked yet.
  std::string waits() const EXCLUDES(mutex_);

  // The operations that are left of one generation, the oldest first.
  struct Snapshot {
    std::string group;
    GenerationRecord generation;
    std::vector<OperationRecord> operations;
  };
  // nullopt: it is not known any more.
  std::optional<Snapshot> snapshotOf(int64_t generation) const EXCLUDES(mutex_);
  // Of all generations that are known.
  std::vector<Snapshot> snapshots() const EXCLUDES(mutex_);

 private:
  struct Free {
    void operator()(OperationRecord* ring) const { std::free(ring); }
  };
  using Ring = std::unique_ptr<OperationRecord[], Free>;

  OperationRecord& slot(uint64_t number) const REQUIRES(mutex_);
  OperationRecord* find(uint64_t number) const REQUIRES(mutex_);
  uint64_t oldest(size_t look_back) const REQUIRES(mutex_);
  Snapshot snapshotLocked(const GenerationRecord& generation) const REQUIRES(mutex_);
  std::string describe(const OperationRecord& waiting, const GenerationRecord& generation) const;

  const std::string group_;
  const bool dumps_;
  const size_t capacity_;
  mutable Mutex mutex_;
  const Ring ring_;                              // its records are guarded by mutex_
  uint64_t last_ GUARDED_BY(mutex_) = 0;         // number of the last operation
  int64_t counted_ GUARDED_BY(mutex_) = -1;      // the generation whose collectives are counted
  uint64_t collectives_ GUARDED_BY(mutex_) = 0;  // of that one
  uint64_t places_ GUARDED_BY(mutex_) = 0;       // of that one: those that have a place
  OperationTotals totals_ GUARDED_BY(mutex_);
  std::optional<int> first_rank_ GUARDED_BY(mutex_);
  std::deque<GenerationRecord> generations_ GUARDED_BY(mutex_);  // the last ones
};

}  // namespace torchft_ext
