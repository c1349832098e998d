// How a process comes to a job: it founds it together with others that are as new, or finds what
// was founded before it came.
//
// Owner: a joining call, on whose thread it runs. Each call blocks up to its deadline, and throws
// ElasticError. Where `cancelled` says so it gives up its seat and throws kLeftOut. It keeps
// nothing: what stands in the store decides.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "elastic/cancellable_wait.h"
#include "elastic/job_store.h"
#include "elastic/job_store_thread.h"

namespace torchft_ext {

class JobFounder {
 public:
  // size: of the first view, for a job that is not founded yet; rules: likewise. unanswered: for
  // the line in the log that says whom it waits for; null, or empty text: nothing is known.
  JobFounder(JobStoreThread& store, std::string job, int size, ElasticRules rules,
             std::function<std::string()> unanswered = {})
      : store_(store),
        job_(std::move(job)),
        size_(static_cast<size_t>(size)),
        rules_(rules),
        unanswered_(std::move(unanswered)) {}

  struct Place {
    Founding founding;
    std::vector<Member> contacts;  // whom to ask for a place, where the first view has none for it
  };
  // The store may come up later than those who meet there: it is waited for. JobOverError: the job
  // has ended well.
  Place findPlace(const Member& self, Deadline deadline, const Cancelled& cancelled) const;

 private:
  Founding awaitFounding(const Member& self, Deadline deadline, const Cancelled& cancelled) const;
  std::optional<Founding> found(Deadline deadline, const Cancelled& cancelled) const;
  void tellWaiting(size_t come, const std::optional<ElasticError>& trouble) const;
  [[noreturn]] void leave(const Member& self, std::optional<size_t> seat) const;
  [[noreturn]] void throwTooFew(size_t found) const;

  JobStoreThread& store_;
  const std::string job_;
  const size_t size_;
  const ElasticRules rules_;
  const std::function<std::string()> unanswered_;
};

}  // namespace torchft_ext
