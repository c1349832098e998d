#include "elastic/way_probes.h"

#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

using std::chrono::seconds;
using Ids = std::vector<MemberId>;

class ANewcomer : public testing::Test {
 protected:
  ANewcomer() { ways_.setTargets({one_}); }

  const MemberId one_ = MemberId::random();
  const Clock::time_point begin_ = Clock::now();
  WayProbes ways_;
};

TEST_F(ANewcomer, ProbesUntilThereIsAnAnswer) {
  EXPECT_EQ(ways_.due(begin_), Ids{one_});
  ways_.sent(one_, begin_);
  EXPECT_TRUE(ways_.due(begin_ + WayProbes::kAgain - seconds(1)).empty());
  EXPECT_EQ(ways_.due(begin_ + WayProbes::kAgain), Ids{one_});
  EXPECT_EQ(ways_.unreached(), Ids{one_});
  EXPECT_TRUE(ways_.answered(one_));
  EXPECT_FALSE(ways_.answered(one_));
  EXPECT_TRUE(ways_.due(begin_ + 2 * WayProbes::kAgain).empty());
  EXPECT_TRUE(ways_.unreached().empty());
}

TEST_F(ANewcomer, ProbesAtOnceWhoWasLost) {
  ways_.sent(one_, begin_);
  ways_.answered(one_);
  EXPECT_TRUE(ways_.lose(one_));
  EXPECT_FALSE(ways_.lose(one_));
  EXPECT_EQ(ways_.due(begin_), Ids{one_});
}

TEST_F(ANewcomer, HasReachedAlsoWhoIsNoTargetYet) {
  const MemberId other = MemberId::random();
  ways_.answered(other);
  ways_.setTargets({one_, other});
  EXPECT_EQ(ways_.unreached(), Ids{one_});
}

}  // namespace
}  // namespace torchft_ext
