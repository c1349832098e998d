// Explores every schedule of small worlds: the real transition code of the membership protocol,
// any order of messages, votes, deaths, suspicions and repetitions within the budgets.
// TORCHFT_EXT_MODEL=full: the larger budgets, some minutes.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_set>
#include <utility>

#include "cpp/elastic/elastic_world.h"

namespace torchft_ext {
namespace {

struct Digest {
  uint64_t a;
  uint64_t b;
  friend bool operator==(const Digest&, const Digest&) = default;
};
struct DigestHash {
  size_t operator()(const Digest& digest) const { return digest.a; }
};

uint64_t mix(uint64_t value) {
  value ^= value >> 32;
  value *= 0xd6e8feb86659fd93U;
  value ^= value >> 29;
  return value;
}

Digest digestOf(const std::string& bytes) {
  Digest digest{0x9e3779b97f4a7c15U, 0xc2b2ae3d27d4eb4fU};
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t word = 0;
    bytes.copy(reinterpret_cast<char*>(&word), 8, at);
    digest.a = mix(digest.a ^ word) + at;
    digest.b = mix(digest.b + word * 0xff51afd7ed558ccdU);
  }
  return digest;
}

struct Exploration {
  uint64_t states = 0;
  uint64_t settled = 0;
  std::string wrong;
  std::vector<std::string> schedule;  // that led to it
};

class Explorer {
 public:
  explicit Explorer(uint64_t most_states) : most_states_(most_states) {}

  Exploration run(ElasticWorld first) {
    visit(std::move(first));
    return std::move(result_);
  }

 private:
  // Depth first, with a stack of its own: schedules are long.
  void visit(ElasticWorld first) {
    struct Frame {
      ElasticWorld world;
      std::vector<ElasticAction> actions;
      size_t next = 0;
    };
    std::vector<Frame> stack;
    const auto enter = [&](ElasticWorld world) {
      if (!seen_.insert(digestOf(world.fingerprint())).second) return;
      ++result_.states;
      if (!check(world)) return;
      std::vector<ElasticAction> actions = world.actions();
      stack.push_back({std::move(world), std::move(actions)});
    };
    enter(std::move(first));
    while (!stack.empty() && result_.wrong.empty() && result_.states < most_states_) {
      Frame& frame = stack.back();
      if (frame.next == frame.actions.size()) {
        stack.pop_back();
        continue;
      }
      const ElasticAction action = frame.actions[frame.next++];
      ElasticWorld world = frame.world;
      world.take(action);
      if (!world.wrong().empty()) result_.wrong = world.wrong();
      if (result_.wrong.empty()) enter(std::move(world));
      if (!result_.wrong.empty()) {
        for (const Frame& one : stack) {
          if (one.next > 0) {
            result_.schedule.push_back(ElasticWorld::describe(one.actions[one.next - 1]));
          }
        }
      }
    }
  }

  // Every state is left to itself, or where there are many, one of four.
  bool check(const ElasticWorld& world) {
    if (result_.states > 100000 && result_.states % 4 != 0) return true;
    if (!world.mustSettle()) return true;
    ElasticWorld copy = world;
    ++result_.settled;
    result_.wrong = copy.settle();
    return result_.wrong.empty();
  }

  uint64_t most_states_;
  std::unordered_set<Digest, DigestHash> seen_;
  Exploration result_;
};

#if defined(TFT_SANITIZED)
constexpr uint64_t kMostStates = 4000;  // what runs is one thread's arithmetic: a sample does
constexpr bool kAll = false;
#else
constexpr uint64_t kMostStates = 20000000;
constexpr bool kAll = true;
#endif

bool full() {
  const char* asked = std::getenv("TORCHFT_EXT_MODEL");
  return asked != nullptr && std::string(asked) == "full";
}

Exploration explore(ElasticWorld first) {
  const auto began = std::chrono::steady_clock::now();
  Exploration found = Explorer(kMostStates).run(std::move(first));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf("%llu states, %llu settled, %.1f s\n", static_cast<unsigned long long>(found.states),
              static_cast<unsigned long long>(found.settled), took.count());
  return found;
}

std::string told(const Exploration& found) {
  std::string text = found.wrong;
  for (const std::string& action : found.schedule) text += "\n  " + action;
  return text;
}

void expectSafe(const ElasticWorldOptions& options) {
  const Exploration found = explore(ElasticWorld(options));
  EXPECT_EQ(found.wrong, "") << told(found);
  EXPECT_TRUE(found.states < kMostStates || !kAll) << "not exhaustive";
  EXPECT_GT(found.states, 100U);
}

ElasticWorldOptions three() {
  ElasticWorldOptions options;
  options.members = 3;
  options.deaths = 1;
  options.agreements = 2;
  options.noes = 1;
  options.retries = full() ? 1 : 0;
  options.views = 3;
  return options;
}

// One of the three is alone with its shard.
ElasticWorldOptions threeWhoseDigestsDiffer() {
  ElasticWorldOptions options = three();
  options.digests = true;
  options.divergences = 1;
  options.agreements = full() ? 2 : 1;
  options.noes = 0;
  options.retries = 0;
  return options;
}

// Some hang: before they vote, in the midst of an agreement, and when they have its answer.
ElasticWorldOptions threeOfWhomSomeHang() {
  ElasticWorldOptions options = three();
  options.recoveries = 1;
  options.exclusions = 1;
  options.agreements = 1;
  options.views = full() ? 3 : 2;
  options.deaths = options.suspicions = 0;
  options.noes = 0;
  options.retries = 0;
  return options;
}

// As views of more members do.
ElasticWorldOptions fourThatRelay() {
  ElasticWorldOptions options;
  options.members = 4;
  options.parts.most_tell_directly = 3;
  options.wants = 1;
  options.views = 2;
  return options;
}

ElasticWorldOptions twoAndWitness() {
  ElasticWorldOptions options;
  options.members = 2;
  options.witness = true;
  options.deaths = 1;
  options.suspicions = 1;
  options.agreements = full() ? 2 : 1;
  options.retries = full() ? 2 : 1;
  options.views = 3;
  return options;
}

ElasticWorldOptions fourCutInTwo() {
  ElasticWorldOptions options;
  options.members = 4;
  options.witness = true;
  options.cut = {{0, 2}, {0, 3}, {1, 2}, {1, 3}};
  options.agreements = 0;
  options.views = 2;
  return options;
}

ElasticWorldOptions fourAndACutLink() {
  ElasticWorldOptions options;
  options.members = 4;
  options.witness = true;
  options.cut = {{0, 3}};
  options.deaths = 1;
  options.agreements = 0;
  options.views = 2;
  return options;
}

ElasticWorldOptions newcomers() {
  ElasticWorldOptions options;
  options.members = 1;
  options.newcomers = 2;
  options.wants = 1;
  options.deaths = 2;
  options.views = 3;
  return options;
}

ElasticWorldOptions storesRule() {
  ElasticWorldOptions options;
  options.members = 3;
  options.witness = true;
  options.store_rule = true;
  options.suspicions = full() ? 1 : 0;
  options.deaths = 1;
  options.views = full() ? 2 : 3;
  return options;
}

TEST(ElasticModel, ThreeMembers) {
  expectSafe(three());
}
TEST(ElasticModel, ThreeMembersWhoseDigestsDiffer) {
  expectSafe(threeWhoseDigestsDiffer());
}
TEST(ElasticModel, ThreeMembersOfWhomSomeHang) {
  expectSafe(threeOfWhomSomeHang());
}
TEST(ElasticModel, FourMembersThatRelayWhatTheyAreTold) {
  expectSafe(fourThatRelay());
}
TEST(ElasticModel, TwoMembersAndAWitness) {
  expectSafe(twoAndWitness());
}
TEST(ElasticModel, AWitnessThatRestarts) {
  ElasticWorldOptions options = twoAndWitness();
  options.witness_restarts = 1;
  expectSafe(options);
}
// Agreements say so, and the next view has the one that is there now.
TEST(ElasticModel, AWitnessThatIsAppointedAnewAndServes) {
  ElasticWorldOptions options = twoAndWitness();
  options.witness_restarts = 1;
  options.suspicions = 0;
  options.agreements = 2;
  options.retries = 0;
  options.views = 2;
  expectSafe(options);
}
TEST(ElasticModel, AMemberThatGoesOnAlone) {
  ElasticWorldOptions options = three();
  options.partings = 1;
  options.deaths = 0;
  options.agreements = 1;
  options.noes = 0;
  options.views = 2;
  expectSafe(options);
}
// The lineage that it begins takes a newcomer in. The store decides there too, once it is found.
TEST(ElasticModel, AMemberThatGoesOnAloneByTheStoresRule) {
  ElasticWorldOptions options = storesRule();
  options.members = 1;
  options.newcomers = 1;
  options.partings = 1;
  options.wants = 1;
  options.suspicions = 0;
  options.views = 4;
  expectSafe(options);
}
// And for those who stay too.
TEST(ElasticModel, OneOfTwoThatGoesOnAloneByTheStoresRule) {
  ElasticWorldOptions options = storesRule();
  options.members = 2;
  options.newcomers = full() ? 1 : 0;
  options.partings = 1;
  options.deaths = 0;
  options.suspicions = 0;
  options.views = full() ? 4 : 3;
  expectSafe(options);
}
TEST(ElasticModel, AWitnessThatIsLost) {
  ElasticWorldOptions options = twoAndWitness();
  options.witness_losses = 1;
  expectSafe(options);
}
TEST(ElasticModel, FourMembersCutInTwoAndADeath) {
  ElasticWorldOptions options = fourCutInTwo();
  options.deaths = full() ? 1 : 0;
  expectSafe(options);
}
TEST(ElasticModel, TwoMembersCutInTwoThatHeal) {
  ElasticWorldOptions options = twoAndWitness();
  options.deaths = 0;
  options.suspicions = 0;
  options.cut = {{0, 1}};
  options.heals = true;
  expectSafe(options);
}
TEST(ElasticModel, FourMembersWithACutLink) {
  expectSafe(fourAndACutLink());
}
TEST(ElasticModel, Newcomers) {
  expectSafe(newcomers());
}
// In votes and promises, of agreements that end by the view and of those that end by the next one.
TEST(ElasticModel, NewcomersThatAreHeldBack) {
  ElasticWorldOptions options = newcomers();
  options.members = 2;
  options.newcomers = 1;
  options.holds = 1;
  options.deaths = 0;
  options.views = 2;
  expectSafe(options);
}
TEST(ElasticModel, TheStoresRule) {
  expectSafe(storesRule());
}

// ---- without one of its parts

void expectMissed(ElasticWorld first, const std::string& what) {
  const Exploration found = explore(std::move(first));
  EXPECT_TRUE(found.wrong.find(what) != std::string::npos || !kAll) << told(found);
}

void expectMissed(const ElasticWorldOptions& options, const std::string& what) {
  expectMissed(ElasticWorld(options), what);
}

// Takes actions of these two members, and of the store with member 0, until no such action is left
// or the first member has a new view.
void goOn(ElasticWorld& world, int first, int second) {
  using Kind = ElasticAction::Kind;
  const auto is_theirs = [first, second](const ElasticAction& action) {
    const bool from = action.a == first || action.a == second;
    const bool to = action.b == first || action.b == second;
    switch (action.kind) {
      case Kind::kDetect:
        return true;
      case Kind::kDeliver:
        return from && to;
      case Kind::kWitness:
      case Kind::kReply:
        return from && action.a == 0;
      default:
        return false;
    }
  };
  while (world.core(first).view().number == 1) {
    const std::vector<ElasticAction> all = world.actions();
    const auto next = std::find_if(all.begin(), all.end(), is_theirs);
    if (next == all.end()) return;
    world.take(*next);
  }
}

// Of four members, cut in two, the first decides by the second and the store, and dies before it
// tells anybody; the others have accepted a view of their own. From here the explorer needs
// seconds, from the beginning minutes.
ElasticWorld whereTheFirstOfFourHasDecidedAndDied(const ElasticWorldOptions& options) {
  ElasticWorld world(options);
  goOn(world, 0, 1);
  world.take({ElasticAction::Kind::kDie, 0, 0});
  goOn(world, 2, 3);
  return world;
}

TEST(ElasticModel, MissesThatTheWitnessComesFirst) {
  ElasticWorldOptions options = fourCutInTwo();
  options.parts.witness_first = false;
  options.heals = true;
  options.deaths = 1;
  expectMissed(whereTheFirstOfFourHasDecidedAndDied(options), "two views");
}
TEST(ElasticModel, MissesTheSecondRound) {
  ElasticWorldOptions options = three();
  options.parts.second_round = false;
  expectMissed(options, "two answers");
}
TEST(ElasticModel, MissesThatAPromiseStopsAgreements) {
  ElasticWorldOptions options = three();
  options.parts.stop_at_promise = false;
  expectMissed(options, "two answers");
}
TEST(ElasticModel, MissesThatDigestsCount) {
  ElasticWorldOptions options = threeWhoseDigestsDiffer();
  options.parts.digests_count = false;
  expectMissed(options, "ok although the digests of members");
}
TEST(ElasticModel, MissesThatFewOfTheReadyLeaveNobodyOut) {
  ElasticWorldOptions options = threeOfWhomSomeHang();
  options.parts.ready_are_enough = false;
  expectMissed(options, "left out by fewer than half");
}
TEST(ElasticModel, MissesThatTheWitnessIsTheOneOfTheView) {
  ElasticWorldOptions options = twoAndWitness();
  options.witness_restarts = 1;
  options.parts.witness_is_the_views = false;
  expectMissed(options, "two views");
}
TEST(ElasticModel, MissesThatLineagesAreApart) {
  ElasticWorldOptions options = three();
  options.partings = 1;
  options.parts.lineages_apart = false;
  expectMissed(options, "another's lineage");
}
TEST(ElasticModel, MissesThatLearnersOnlyWatch) {
  ElasticWorldOptions options = newcomers();
  options.parts.learners_watch = false;
  expectMissed(options, "it does not come to an end");
}

}  // namespace
}  // namespace torchft_ext
