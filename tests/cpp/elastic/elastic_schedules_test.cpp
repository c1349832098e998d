// Random schedules of jobs that are too large to explore: votes, deaths, suspicions, newcomers,
// cuts that heal, a witness that restarts. Each ends without faults, and then has to come to rest.
//
//   TORCHFT_EXT_MODEL=full               the numbers that a release is checked with
//   TORCHFT_EXT_MODEL_SEEDS=10000-19999  these seeds of each size, the last included: for several
//                                        processes, each with its part
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "cpp/elastic/elastic_world.h"

namespace torchft_ext {
namespace {

bool full() {
  const char* asked = std::getenv("TORCHFT_EXT_MODEL");
  return asked != nullptr && std::string(asked) == "full";
}

struct Seeds {
  int first = 0;
  int last = 0;
  int count() const { return last - first + 1; }
};

// So many from 0 on, unless the environment names others.
Seeds seedsOf(int otherwise) {
  Seeds seeds{0, otherwise - 1};
  const char* asked = std::getenv("TORCHFT_EXT_MODEL_SEEDS");
  if (asked == nullptr) return seeds;
  const bool whole = std::sscanf(asked, "%d-%d", &seeds.first, &seeds.last) == 2;
  EXPECT_TRUE(whole && seeds.first >= 0 && seeds.count() > 0) << "no range of seeds: " << asked;
  return seeds;
}

ElasticWorldOptions drawOptions(std::mt19937_64& random, int members) {
  const auto upTo = [&](int most) { return static_cast<int>(random() % (most + 1)); };
  ElasticWorldOptions options;
  options.members = members;
  options.newcomers = upTo(2);
  options.witness = upTo(1) == 1;
  options.store_rule = upTo(4) == 0;
  options.witness = options.witness || options.store_rule;
  options.min_size = 1 + upTo(members / 2);
  options.deaths = upTo(members / 2);
  options.suspicions = upTo(3);
  options.agreements = 1 + upTo(3);
  options.noes = upTo(2);
  options.views = 2 + upTo(4);
  options.retries = upTo(8);
  options.wants = upTo(2);
  options.witness_restarts = upTo(2);
  options.partings = upTo(5) == 0 ? 1 : 0;
  options.secrets = true;
  options.groups_stand = upTo(2) == 0;
  if (upTo(2) == 0) {
    options.heals = true;
    const int side = 1 + upTo(members - 2);
    for (int i = 0; i < side; ++i) {
      for (int j = side; j < members; ++j) options.cut.insert({i, j});
    }
  }
  return options;
}

// What schedules have beside what is drawn for each.
struct Beside {
  ElasticParts parts;
  int leaves = 0;
  int breaks = 0;
  bool hand_over = false;  // members leave and die, and all newcomers find what the store has
  int divergences = 0;     // not 0: votes have digests
  int exclusions = 0;      // and as many recoveries
  int holds = 0;           // not 0: there are newcomers
};

struct Schedule {
  Schedule(int members, int seed, int most_steps, const Beside& beside)
      : random(static_cast<uint64_t>(seed) * 7919U + static_cast<uint64_t>(members)),
        world(optionsOf(random, members, beside)) {
    for (; steps < most_steps && world.wrong().empty(); ++steps) {
      const auto action = next();
      if (!action) break;
      world.take(*action);
    }
  }
  std::optional<ElasticAction> next() {
    if (const auto drawn = world.draw(random)) return drawn;
    const std::vector<ElasticAction> all = world.actions();
    return all.empty() ? std::nullopt : std::optional(all[random() % all.size()]);
  }
  static ElasticWorldOptions optionsOf(std::mt19937_64& random, int members, const Beside& beside) {
    ElasticWorldOptions options = drawOptions(random, members);
    options.parts = beside.parts;
    options.leaves = beside.leaves;
    options.breaks = beside.breaks;
    options.divergences = beside.divergences;
    options.exclusions = options.recoveries = beside.exclusions;
    options.digests = beside.divergences > 0;
    options.holds = beside.holds;
    if (beside.holds > 0) options.newcomers = 2;
    if (beside.hand_over) {
      options.newcomers = 3;
      options.witness = options.store_rule = true;
      options.min_size = 1;
      options.deaths = members;
      options.partings = options.witness_restarts = 0;
      options.cut.clear();
      options.heals = false;
    }
    return options;
  }

  std::mt19937_64 random;
  ElasticWorld world;
  int steps = 0;
};

void runSchedules(int members, int schedules, int most_steps, const Beside& beside = {}) {
#if defined(TFT_SANITIZED)
  schedules =
      std::max(schedules / 40, std::min(schedules, 10));  // one thread's arithmetic: a sample does
#endif
  const Seeds seeds = seedsOf(schedules);
  uint64_t steps = 0;
  uint64_t views = 0;
  int settled = 0;
  for (int seed = seeds.first; seed <= seeds.last; ++seed) {
    Schedule schedule(members, seed, most_steps, beside);
    ElasticWorld& world = schedule.world;
    steps += static_cast<uint64_t>(schedule.steps);
    ASSERT_EQ(world.wrong(), "") << members << " members, seed " << seed;
    if (!world.mustSettle()) continue;
    ++settled;
    ASSERT_EQ(world.settle(), "") << members << " members, seed " << seed;
    views += world.newestView();
  }
  std::printf("%d schedules, %llu steps, %d settled, in view %.1f on average\n", seeds.count(),
              static_cast<unsigned long long>(steps), settled,
              static_cast<double>(views) / std::max(settled, 1));
  EXPECT_GE(settled, seeds.count() / 10);
  EXPECT_GT(views, 3 * static_cast<uint64_t>(settled) / 2);
}

// From a seed on before which nothing was found when this was written: one in thousands finds it.
std::string firstWrong(int members, int from, int schedules, int most_steps,
                       const ElasticParts& parts) {
  for (int seed = from; seed < from + schedules; ++seed) {
    const Schedule schedule(members, seed, most_steps, {parts});
    if (schedule.world.wrong().empty()) continue;
    std::printf("seed %d: %s\n", seed, schedule.world.wrong().c_str());
    return schedule.world.wrong();
  }
  return {};
}

ElasticParts relaying() {
  ElasticParts parts;
  parts.most_tell_directly = 3;
  return parts;
}

TEST(ElasticSchedules, OfThreeMembers) {
  runSchedules(3, full() ? 20000 : 4000, 400);
}
// As larger views do: with deaths, wrong suspicions and noes too many to explore.
TEST(ElasticSchedules, OfFourMembersThatRelay) {
  runSchedules(4, full() ? 20000 : 4000, 600, {relaying()});
}
TEST(ElasticSchedules, OfFourMembersThatRelayDigestsThatDiffer) {
  Beside beside{relaying(), 1, 2};
  beside.divergences = 2;
  runSchedules(4, full() ? 20000 : 2000, 600, beside);
}
TEST(ElasticSchedules, OfEightMembersWhoseDigestsDiffer) {
  Beside beside;
  beside.divergences = 3;
  runSchedules(8, full() ? 20000 : 1000, 1500, beside);
}
TEST(ElasticSchedules, OfFourMembersOfWhomSomeHang) {
  Beside beside{relaying(), 0, 2};
  beside.exclusions = 3;
  runSchedules(4, full() ? 20000 : 2000, 600, beside);
}
TEST(ElasticSchedules, OfEightMembersOfWhomSomeHang) {
  Beside beside;
  beside.exclusions = 4;
  runSchedules(8, full() ? 20000 : 1000, 1500, beside);
}
TEST(ElasticSchedules, OfFourMembersThatHoldNewcomersBack) {
  Beside beside{relaying(), 1, 2};
  beside.holds = 4;
  runSchedules(4, full() ? 20000 : 2000, 600, beside);
}
TEST(ElasticSchedules, OfFourMembersThatRelayMissTheSecondRound) {
  ElasticParts parts = relaying();
  parts.second_round = false;
  EXPECT_EQ(firstWrong(4, 13900, 20000, 600, parts).rfind("two answers", 0), 0U);
}
TEST(ElasticSchedules, OfFourMembersThatRelayMissThatAPromiseStopsAgreements) {
  ElasticParts parts = relaying();
  parts.stop_at_promise = false;
  EXPECT_EQ(firstWrong(4, 17700, 20000, 600, parts).rfind("two answers", 0), 0U);
}
// All may, so that they hand over to newcomers.
TEST(ElasticSchedules, OfThreeMembersThatLeave) {
  runSchedules(3, full() ? 20000 : 4000, 400, {{}, 3});
}
TEST(ElasticSchedules, OfThreeMembersThatLeaveWhileConnectionsBreak) {
  runSchedules(3, full() ? 20000 : 2000, 400, {{}, 3, 6});
}
TEST(ElasticSchedules, OfThreeMembersThatHandOver) {
  runSchedules(3, full() ? 20000 : 4000, 400, {{}, 3, 6, true});
}
TEST(ElasticSchedules, OfEightMembersThatLeaveWhileConnectionsBreak) {
  runSchedules(8, full() ? 20000 : 500, 1500, {{}, 4, 12});
}
TEST(ElasticSchedules, OfEightMembersThatLeave) {
  runSchedules(8, full() ? 20000 : 1000, 1500, {{}, 4});
}
TEST(ElasticSchedules, OfEightMembers) {
  runSchedules(8, full() ? 20000 : 5000, 1500);
}
TEST(ElasticSchedules, OfSixtyFourMembers) {
  runSchedules(64, full() ? 20000 : 40, 20000);
}

}  // namespace
}  // namespace torchft_ext
