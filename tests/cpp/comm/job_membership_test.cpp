#include "comm/job_membership.h"

#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

TEST(JobMembership, IsOfNoJobAtFirstAndSoAreGroupsBesideIt) {
  EXPECT_EQ(JobMembership().inJob(), InJob::kNo);
  EXPECT_EQ(JobMembership().beside(/*by_rule=*/true).inJob(), InJob::kNo);
}

TEST(JobMembership, GroupsBesideOneOfAJobAreOfOneViewOrMadeAnewByRule) {
  const JobMembership followed = JobMembership::following(nullptr);
  EXPECT_EQ(followed.inJob(), InJob::kFollows);
  EXPECT_EQ(followed.beside(/*by_rule=*/false).inJob(), InJob::kOfOneView);
  EXPECT_EQ(followed.beside(/*by_rule=*/true).inJob(), InJob::kMadeAnew);
}

TEST(JobMembership, GroupsBesideOneOfAJobCountTheirSuccessesWithIt) {
  const auto successes = std::make_shared<SuccessCount>(0);
  const JobMembership followed = JobMembership::following(successes);
  EXPECT_EQ(followed.beside(/*by_rule=*/false).successes(), successes);
  EXPECT_EQ(JobMembership().successes(), nullptr);
}

}  // namespace
}  // namespace torchft_ext
