// The one thread that talks to one store server, for every group that uses it.
//
// Owner: a process-wide registry, by server address; kept while any group holds it. Callers never block in the
// store: they post a request and wait for its answer with their own deadline, and may walk away. A call
// that does not return is noticed by the next caller (older than kStuckAfter past its deadline): the thread is
// abandoned, reported once and replaced by a fresh one with a fresh client.
// Threads: any. Never throws StoreError: errors are in the result.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/task_thread.h"
#include "rendezvous/store.h"

namespace torchft_ext {

enum class StoreStatus { kOk, kTimedOut, kCancelled, kLost };

struct StoreReply {
  StoreStatus status = StoreStatus::kOk;
  std::vector<std::string> values;
  std::string error;  // kLost: what the store said; kTimedOut: which keys were awaited
};

// True: the caller gives up (abort, signal). Called every few milliseconds on the waiting thread.
using Cancelled = std::function<bool()>;

class StoreThread {
 public:
  // The same factory key gives the same object. key: "host:port", or unique for in-process stores.
  static std::shared_ptr<StoreThread> forServer(const std::string& key, StoreFactory factory);
  explicit StoreThread(std::string key, StoreFactory factory);
  ~StoreThread();

  StoreReply set(const std::string& key, const std::string& value, Deadline deadline, const Cancelled& cancelled);
  // Waits until every key exists. Polls (first at once, then after 0.1, 0.2 ... 5 ms).
  StoreReply awaitAll(const std::vector<std::string>& keys, Deadline deadline, const Cancelled& cancelled);
  // One look. Ok with empty values: a key is missing.
  StoreReply getAll(const std::vector<std::string>& keys, Deadline deadline, const Cancelled& cancelled);
  // Not waited for; errors are dropped (the keys are rubbish already).
  void removeLater(std::vector<std::string> keys);

  // Ends every store thread of the process; true if all ended by the deadline (else abandoned).
  static bool stopAll(Deadline deadline);

 private:
  struct Worker;
  struct Request;
  StoreReply submit(std::function<void(StoreClient&, StoreReply&)> call, Deadline deadline, const Cancelled& cancelled);

  const std::string key_;
  const StoreFactory factory_;
  Mutex mutex_;
  std::shared_ptr<Worker> worker_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
