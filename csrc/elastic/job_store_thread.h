// The thread on which one member talks to its job's store: a call there may block for as long as
// the store is stuck, and nobody but the caller of call() waits for it.
//
// Owner: an ElasticMember. Threads: any. After stop() nothing runs any more: call() throws, post()
// is false. A task that does not return keeps the store's client for itself; it uses nothing else.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "base/task_thread.h"
#include "elastic/cancellable_wait.h"
#include "elastic/job_store.h"
#include "torchft_ext/elastic_error.h"

namespace torchft_ext {

class JobStoreThread {
 public:
  // job: its name, for messages.
  JobStoreThread(std::string job, ComparingStoreFactory factory, std::string prefix,
                 bool may_witness = true);

  // What ask(JobStore&) returns. Throws ElasticError (kStore): it threw, or has not returned by the
  // deadline.
  template <typename Ask>
  std::invoke_result_t<Ask, JobStore&> call(const Ask& ask, Deadline deadline,
                                            const Cancelled& cancelled);
  // Not waited for. The task does not throw.
  bool post(std::function<void(JobStore&)> task);
  bool stop(Deadline deadline) { return thread_.stop(deadline); }

 private:
  template <typename Result>
  struct Pending {
    Mutex mutex;
    CondVar changed;
    std::optional<Result> result GUARDED_BY(mutex);
    std::string error GUARDED_BY(mutex);
    bool done GUARDED_BY(mutex) = false;
  };
  [[noreturn]] void throwTrouble(const std::string& trouble) const;

  const std::string job_;
  const std::shared_ptr<JobStore> store_;  // used on the thread alone
  TaskThread thread_;
};

template <typename Ask>
std::invoke_result_t<Ask, JobStore&> JobStoreThread::call(const Ask& ask, Deadline deadline,
                                                          const Cancelled& cancelled) {
  using Result = std::invoke_result_t<Ask, JobStore&>;
  const auto pending = std::make_shared<Pending<Result>>();
  const bool posted = post([pending, ask](JobStore& store) {
    std::optional<Result> result;
    std::string error;
    try {
      result = ask(store);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    const MutexLock lock(pending->mutex);
    pending->result = std::move(result);
    pending->error = std::move(error);
    pending->done = true;
    pending->changed.notifyAll();
  });
  const MutexLock lock(pending->mutex);
  const auto done = [&]() NO_THREAD_SAFETY_ANALYSIS { return pending->done; };
  if (posted) waitUntilDone(pending->mutex, pending->changed, done, deadline, cancelled);
  if (!pending->done) throwTrouble("did not answer by the deadline");
  if (!pending->result) throwTrouble("failed: " + pending->error);
  return std::move(*pending->result);
}

}  // namespace torchft_ext
