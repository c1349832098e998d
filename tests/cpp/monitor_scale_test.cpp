// What the overlay costs and how fast it is, in worlds of real sentries: lines, notices, hops.
#include <gtest/gtest.h>

#include <numeric>

#include "monitor_world.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kHop{1};  // every message takes so long

int logOf(int size) {
  int log = 0;
  while ((1 << log) < size) ++log;
  return log;
}

class MonitorScale : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    WorldOptions options;
    options.processes = size();
    options.seed = std::random_device{}();
    RecordProperty("seed", std::to_string(options.seed));
    world = std::make_unique<MonitorWorld>(options);
    std::vector<int> members(static_cast<size_t>(size()));
    std::iota(members.begin(), members.end(), 0);
    epoch = world->beginEpoch(members);
    world->pass(milliseconds(500));
  }
  int size() const { return GetParam(); }
  uint64_t allLines() const {
    uint64_t all = 0;
    for (int i = 0; i < size(); ++i) all += static_cast<uint64_t>(world->lines(i));
    return all;
  }
  // Between the first who knew and the last.
  int64_t hops() const {
    auto first = MonitorWorld::Time::max();
    auto last = MonitorWorld::Time::min();
    for (const int member : world->survivorsOf(epoch)) {
      const auto when = world->toldAt(epoch, member);
      if (!when) continue;
      first = std::min(first, *when);
      last = std::max(last, *when);
    }
    return (last - first) / kHop;
  }
  void expectAllTold(int culprit) const {
    EXPECT_TRUE(world->blocked().empty());
    for (const int member : world->survivorsOf(epoch)) {
      const Failure* told = world->toldOf(epoch, member);
      ASSERT_NE(told, nullptr) << member;
      EXPECT_EQ(told->cause.rank, culprit);
    }
  }

  std::unique_ptr<MonitorWorld> world;
  int epoch = -1;
};

TEST_P(MonitorScale, LinesAreAFew) {
  for (int i = 0; i < size(); ++i) {
    ASSERT_LE(world->lines(i), 2 * logOf(size()) + 2) << i;
    ASSERT_GE(world->lines(i), std::min(size() - 1, 2)) << i;
  }
}

TEST_P(MonitorScale, DeathReachesEverySurvivorInAFewHopsAndNotices) {
  const uint64_t lines = allLines();
  const int victim = size() / 3;
  world->kill(victim);
  world->pass(milliseconds(100));
  expectAllTold(victim);
  EXPECT_LE(hops(), logOf(size()) + 1);
  EXPECT_LE(world->noticesSent(), lines);
  std::cout << size() << " processes: " << lines << " ends of lines, " << world->noticesSent()
            << " notices, " << hops() << " hops after the first who knew\n";
}

TEST_P(MonitorScale, AbortReachesEveryMemberInAFewHopsAndNotices) {
  const uint64_t lines = allLines();
  world->abort(epoch, size() - 1);
  world->pass(milliseconds(100));
  expectAllTold(size() - 1);
  EXPECT_LE(hops(), logOf(size()) + 1);
  EXPECT_LE(world->noticesSent(), lines);
}

TEST_P(MonitorScale, DeathOfAllNeighboursOfAProcessLeavesItToldToo) {
  for (int step = 1; step <= size() / 2; step *= 2) {
    world->kill(step % size());
    world->kill((size() - step) % size());
  }
  world->pass(milliseconds(100));
  EXPECT_TRUE(world->blocked().empty());
  EXPECT_NE(world->toldOf(epoch, 0), nullptr);
}

TEST_P(MonitorScale, DeathOfHalfTheWorldAtOnceBlocksNobody) {
  for (int i = 0; i < size(); ++i) {
    if (world->random(2) == 0) world->kill(i);
  }
  world->pass(milliseconds(100));
  EXPECT_TRUE(world->blocked().empty());
}

INSTANTIATE_TEST_SUITE_P(Sizes, MonitorScale, ::testing::Values(4, 64, 1024));

}  // namespace
}  // namespace torchft_ext
