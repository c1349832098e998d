// The one thread that talks to one store server, for every group that uses it.
//
// Owner: whoever uses it; forServer() gives all of them the same one while any holds it. Callers
// never block in the store: they post a request and wait for its answer with their own deadline,
// and may walk away. A call that has not returned for kStuckAfter, while a caller has given up on
// it, makes the thread be abandoned, reported and replaced by a fresh one with a fresh client,
// which takes over the waiting requests (not more than kMostStuck times before one returns: a
// frozen server must not cost a thread per attempt). Waiting for keys occupies the thread only
// while it looks: other requests run between two looks. Threads: any. Never throws (but for what
// `cancelled` throws, which leaves the call): errors are in the reply. Destruction does not block;
// removals posted before are still done.
//
// A client that was lent is used instead of one of its own: a new connection may hold up a TCPStore
// for seconds, for everyone, where a name server does not answer. A client of its own is made once
// the lent one is gone, has failed, or has held a call for longer than the lender's patience, or
// than half of an attempt's limit (StoreLimit): its owner may be blocked in it. That call is then
// made again, and the first answer counts.
//
// A write of an abandoned thread may reach the store late. That thread then undoes it: what this
// process has written or found there since takes its place again. What it wrote there stays only
// where it cannot say so any more: the process has ended, or the connection has broken behind it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "membership/store_client.h"

namespace torchft_ext {

// kStarved: this process cannot connect, for want of something of its own.
enum class StoreStatus { kOk, kTimedOut, kCancelled, kLost, kStarved };

struct StoreReply {
  StoreStatus status = StoreStatus::kOk;
  std::vector<std::string> values;
  // kLost: what the store said; kStarved: what lacks; kTimedOut, kCancelled (empty before a
  // request): what was awaited
  std::string error;
};

// True: the caller gives up (abort, signal). Called every few milliseconds on the waiting thread.
using Cancelled = std::function<bool()>;

struct LentClient {
  StoreLoan loan;        // empty: none
  Duration patience{0};  // with one call
};

class LateWrites;
struct StoreRequest;
class StoreThread;
class StoreWorker;

// The limit of somebody, an attempt, who uses a store. While it lives, a call of a lent client that
// has held it up for half of this limit is made again.
class StoreLimit {
 public:
  struct Patience {
    Clock::time_point since;
    Duration patience;
    bool isOver(Clock::time_point call_began) const {
      return Clock::now() - std::max(since, call_began) >= patience;
    }
  };

  StoreLimit(std::shared_ptr<StoreThread> store, Duration limit);
  ~StoreLimit();
  StoreLimit(const StoreLimit&) = delete;
  StoreLimit& operator=(const StoreLimit&) = delete;

 private:
  const std::shared_ptr<StoreThread> store_;
  std::list<Patience>::iterator place_;
};

class StoreThread {
 public:
  static constexpr milliseconds kStuckAfter{1000};
  static constexpr int kMostStuck = 4;
  static constexpr std::chrono::microseconds kFirstPause{100};
  // Looks at the values, on the store thread: true ends the wait. Must not block or throw.
  using Acceptable = std::function<bool(const std::vector<std::string>&)>;

  // The same key gives the same object. key: "host:port", or unique to an in-process store while
  // the factory, which the thread keeps, lives. identity: see below; empty: the key.
  // lent: used if it has neither a client of its own nor a lent one. Throws std::system_error where
  // no thread can be had.
  static std::shared_ptr<StoreThread> forServer(const std::string& key, StoreFactory factory,
                                                const LentClient& lent = {},
                                                std::string identity = "");
  explicit StoreThread(std::string key, StoreFactory factory, const LentClient& lent = {},
                       std::string identity = "");
  // Without a thread: each call runs on the caller's, for as long as the store takes to answer. For
  // what has no thread left, and no key to wait for. What is due later is not done.
  static std::shared_ptr<StoreThread> onCaller(std::string key, StoreFactory factory);
  ~StoreThread();

  // The same for two threads of this process that talk to one store, whatever they call it: a
  // server has its port, since one host has several names.
  const std::string& identity() const { return identity_; }

  StoreReply set(const std::string& key, const std::string& value, Deadline deadline,
                 const Cancelled& cancelled);
  // One after the other; other requests wait meanwhile.
  StoreReply setAll(std::vector<std::pair<std::string, std::string>> pairs, Deadline deadline,
                    const Cancelled& cancelled);
  // Waits until every key exists. Polls (first at once, then after 0.1, 0.2 ... 5 ms).
  StoreReply awaitAll(const std::vector<std::string>& keys, Deadline deadline,
                      const Cancelled& cancelled);
  // As awaitAll, until the values are acceptable too, and until `enough` at most once the store has
  // answered one look: then kTimedOut. pause: between the first two looks; who asks for the same
  // again and again has no need of quick ones.
  StoreReply awaitWhere(const std::vector<std::string>& keys, Acceptable acceptable,
                        Deadline deadline, const Cancelled& cancelled,
                        Deadline enough = Deadline::never(), Duration pause = kFirstPause);
  // One look. Ok with empty values: a key is missing.
  StoreReply getAll(const std::vector<std::string>& keys, Deadline deadline,
                    const Cancelled& cancelled);
  // One look at each. Ok with an empty value for a key that is missing.
  StoreReply getEach(const std::vector<std::string>& keys, Deadline deadline,
                     const Cancelled& cancelled);
  // Not waited for; errors are dropped (the keys are rubbish already).
  void removeLater(std::vector<std::string> keys);
  // Given the value that stands there, and what stands under the keys beside it (empty: nothing):
  // what is to stand there. nullopt leaves it, empty removes it. Runs on the store thread; must not
  // block or throw. Another process's write between look and change is lost. Not waited for; errors
  // are dropped. after: how long the value that stands there is left alone first; the thread stays
  // for it, though its owner is gone, but not when the process ends: then it is not done.
  using Edit = std::function<std::optional<std::string>(const std::string& found,
                                                        const std::vector<std::string>& beside)>;
  void editLater(const std::string& key, Edit edit, std::vector<std::string> beside = {},
                 Duration after = Duration::zero());

  // Ends every store thread of the process; true if all ended by the deadline (else abandoned).
  static bool stopAll(Deadline deadline);

 private:
  friend class StoreLimit;
  StoreReply submit(const std::shared_ptr<StoreRequest>& request, const Cancelled& cancelled,
                    Deadline enough = Deadline::never());
  bool post(const std::shared_ptr<StoreRequest>& request, Duration after = Duration::zero());
  std::shared_ptr<StoreWorker> worker();
  bool inForkedChild() const;
  void replaceIfStuck(bool caller_gave_up);
  std::vector<StoreLimit::Patience> patience();
  // stuck: null: of one without threads.
  StoreThread(std::string key, StoreFactory factory, std::shared_ptr<std::atomic<int>> stuck,
              std::shared_ptr<StoreWorker> worker);

  const std::string key_;
  const std::string identity_;
  const StoreFactory factory_;
  const uint64_t fork_count_;  // of forks: a child has no such thread
  const std::shared_ptr<std::atomic<int>>
      stuck_;  // abandoned workers that are still in a call; they count down
  const std::shared_ptr<LateWrites> late_;
  Mutex mutex_;
  std::list<StoreLimit::Patience> limits_ GUARDED_BY(mutex_);
  std::shared_ptr<StoreWorker> worker_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
