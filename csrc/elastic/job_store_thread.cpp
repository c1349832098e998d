#include "elastic/job_store_thread.h"

namespace torchft_ext {

JobStoreThread::JobStoreThread(std::string job, ComparingStoreFactory factory, std::string prefix,
                               bool may_witness)
    : job_(std::move(job)),
      store_(std::make_shared<JobStore>(std::move(factory), std::move(prefix), may_witness)),
      thread_("ft-jobstore") {}

bool JobStoreThread::post(std::function<void(JobStore&)> task) {
  return thread_.post([store = store_, task = std::move(task)] { task(*store); });
}

void JobStoreThread::throwTrouble(const std::string& trouble) const {
  throw ElasticError(ElasticErrorKind::kStore,
                     "elastic.join: job '" + job_ + "': the store " + trouble +
                         "; see that it runs and can be reached from here");
}

}  // namespace torchft_ext
