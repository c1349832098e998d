// How a group belongs to an elastic job: what its failures advise, and where its successes are
// counted.
//
// A value: Group keeps one, and each generation that begins takes a copy. Which one a group gets is
// decided above, by the job and by whoever makes a group beside another one.
#pragma once

#include <memory>
#include <utility>

#include "comm/lifecycle.h"

namespace torchft_ext {

class JobMembership {
 public:
  JobMembership() = default;  // of no job

  // Of a group whose generations are those of the job's views: recover() begins them. successes:
  // where the job counts operations that succeed; null: they are not counted.
  static JobMembership following(std::shared_ptr<SuccessCount> successes) {
    return {InJob::kFollows, std::move(successes)};
  }
  // Of one that is made beside a group with this membership, for the members of one view. by_rule:
  // the job makes another one in each view.
  JobMembership beside(bool by_rule) const {
    if (in_job_ == InJob::kNo) return {};
    return {by_rule ? InJob::kMadeAnew : InJob::kOfOneView, successes_};
  }

  InJob inJob() const { return in_job_; }
  const std::shared_ptr<SuccessCount>& successes() const { return successes_; }

 private:
  JobMembership(InJob in_job, std::shared_ptr<SuccessCount> successes)
      : in_job_(in_job), successes_(std::move(successes)) {}

  InJob in_job_ = InJob::kNo;
  std::shared_ptr<SuccessCount> successes_{};  // null: nobody asks
};

}  // namespace torchft_ext
