// What the overlay costs and how fast it is, in worlds of real failure propagations: connections,
// notices, hops.
//
// The bounds hold for every seed. Between any two members there is a way of at most log2(n) / 2 + 1
// connections of the overlay, and a member finds what broke next to it in three delays: a
// connection ends, a probe goes, an answer comes. So the last one knows after log2(n) / 2 + 4 of
// the slowest delays. News take the fastest way, not the shortest; yet each hop takes the shortest
// delay at least, so there are no more of them than shortest delays in that time: log2(n) + 1 times
// the jitter, be it the way's bound (from 64 members on) or since there are no more members (4).
#include <gtest/gtest.h>

#include <numeric>

#include "cpp/liveness/monitor_world.h"
#include "cpp/support/test_seeds.h"

namespace torchft_ext {
namespace {

struct Network {
  const char* name;
  milliseconds shortest;
  milliseconds longest;
  uint32_t lost_per_mille;
  milliseconds resent_after;
  milliseconds slowest() const { return longest + resent_after; }
};

void PrintTo(const Network& network, std::ostream* out) {
  *out << network.name;
}

constexpr Network kEven{"even", milliseconds(1), milliseconds(1), 0, milliseconds(0)};
constexpr Network kLossy{"lossy", milliseconds(1), milliseconds(2), 20, milliseconds(2)};

int logOf(int size) {
  int log = 0;
  while ((1 << log) < size) ++log;
  return log;
}

class MonitorScale : public ::testing::TestWithParam<std::tuple<int, Network>> {
 protected:
  void SetUp() override {
    WorldOptions options;
    options.processes = size();
    options.shortest_delay = network().shortest;
    options.longest_delay = network().longest;
    options.lost_per_mille = network().lost_per_mille;
    options.resent_after = network().resent_after;
    options.seed = testSeed();
    world = std::make_unique<MonitorWorld>(options);
    std::vector<int> members(static_cast<size_t>(size()));
    std::iota(members.begin(), members.end(), 0);
    generation = world->beginGeneration(members);
    world->pass(milliseconds(500));
    for (int i = 0; i < size(); ++i) connections += static_cast<uint64_t>(world->connections(i));
  }
  int size() const { return std::get<0>(GetParam()); }
  const Network& network() const { return std::get<1>(GetParam()); }

  void expectFewConnections() const {
    for (int i = 0; i < size(); ++i) {
      ASSERT_LE(world->connections(i), 2 * logOf(size()) + 2) << i;
      ASSERT_GE(world->connections(i), std::min(size() - 1, 2)) << i;
    }
  }
  void passUntilAllMustKnow() { world->pass((logOf(size()) / 2 + 4) * network().slowest()); }
  void expectAllTold() const {
    for (const int member : world->survivorsOf(generation)) {
      ASSERT_NE(world->toldOf(generation, member), nullptr) << member;
    }
  }
  void expectAllToldOf(int culprit) const {
    expectAllTold();
    if (HasFatalFailure()) return;
    for (const int member : world->survivorsOf(generation)) {
      EXPECT_EQ(world->toldOf(generation, member)->cause.rank, culprit) << member;
    }
  }
  int hops() const {
    int most = 0;
    for (const int member : world->survivorsOf(generation)) {
      most = std::max(most, world->hopsTo(generation, member).value_or(0));
    }
    return most;
  }
  int anyone() { return static_cast<int>(world->random(static_cast<uint32_t>(size()))); }
  void cutAnyConnectionOf(int process) {
    const int step = 1 << world->random(static_cast<uint32_t>(logOf(size())));
    world->cutConnection(process, (process + step) % size());
  }
  // At most once each way on each connection. One that is made anew after a cut carries an answer
  // too, each way, since its ends ask each other when it comes up.
  void expectFewHopsAndNotices(int cuts = 0) const {
    EXPECT_LE(hops(), (logOf(size()) + 1) * (network().slowest() / network().shortest));
    EXPECT_LE(world->noticesSent(), connections + 4 * static_cast<uint64_t>(cuts));
    std::cout << size() << " processes, " << network().name << " network: " << connections
              << " ends of connections, " << world->noticesSent() << " notices, " << hops()
              << " hops; digest of what was told: " << std::hex << world->digest() << std::dec
              << "\n";
  }

  std::unique_ptr<MonitorWorld> world;
  int generation = -1;
  uint64_t connections = 0;  // ends of them
};

TEST_P(MonitorScale, DeathReachesEverySurvivorOverFewConnectionsInFewHopsAndNotices) {
  expectFewConnections();
  world->kill(size() / 3);
  passUntilAllMustKnow();
  expectAllToldOf(size() / 3);
  expectFewHopsAndNotices();
}

class MonitorScaleWithLoss : public MonitorScale {};

TEST_P(MonitorScaleWithLoss, AbortReachesEveryMemberThoughConnectionsThatCarryTheUpdatesAreCut) {
  world->abort(generation, size() - 1);
  world->pass(network().shortest);
  const int cuts = logOf(size());
  for (int i = 0; i < cuts; ++i) cutAnyConnectionOf(i == 0 ? size() - 1 : anyone());
  passUntilAllMustKnow();
  expectAllTold();
  expectFewHopsAndNotices(cuts);
}

TEST_P(MonitorScaleWithLoss, DeathOfHalfTheWorldAndCutConnectionsReachEverySurvivor) {
  for (int step = 1; size() > 4 && step <= size() / 2; step *= 2) {  // all neighbours of process 0
    world->kill(step);
    world->kill(size() - step);
  }
  int cuts = 0;
  for (int i = 1; i < size(); ++i) {
    if (world->random(2) == 0) {
      world->kill(i);
    } else {
      cutAnyConnectionOf(i);
      ++cuts;
    }
  }
  passUntilAllMustKnow();
  expectAllTold();
  EXPECT_NE(world->toldOf(generation, 0), nullptr);
  expectFewHopsAndNotices(cuts);
}

std::string nameOf(const ::testing::TestParamInfo<std::tuple<int, Network>>& info) {
  return std::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}

// Worlds of a thousand take most of a sanitizer's time: there one story has them.
const std::vector<int> all_sizes{4, 64, 1024};
const std::vector<int> quick_sizes{4, 64};
INSTANTIATE_TEST_SUITE_P(Sizes, MonitorScale,
                         ::testing::Combine(::testing::ValuesIn(all_sizes),
                                            ::testing::Values(kEven, kLossy)),
                         nameOf);
INSTANTIATE_TEST_SUITE_P(Sizes, MonitorScaleWithLoss,
                         ::testing::Combine(::testing::ValuesIn(kSanitized ? quick_sizes
                                                                           : all_sizes),
                                            ::testing::Values(kLossy)),
                         nameOf);

}  // namespace
}  // namespace torchft_ext
