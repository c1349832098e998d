// A rank that stops between any two instructions of any collective in shared memory, or in the
// middle of one that writes: for ever, or until the others have gone as far as they come without
// it.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cpp/host/lane_world.h"
#include "cpp/host/shared_cases.h"
#include "cpp/host/shared_world.h"

namespace torchft_ext {
namespace {

using namespace shared_test;  // NOLINT(google-build-using-namespace)
using State = SharedExecution::State;

constexpr size_t kSlot = 1024;
constexpr size_t kAll = std::numeric_limits<size_t>::max();
// Of each plan; and some that the built-in table does not have.
const std::string kPlans =
    "allreduce any any 80 line\nallreduce any any 1K once\nallreduce any any any slices\n"
    "gather any any any chunks\n";
// Items of 4 bytes: in the line; in a slot; in so many chunks that the next operation writes slots
// again.
constexpr size_t kCounts[] = {3, 100, 600};

// One rank's operations, one after the other.
class Runner {
 public:
  Runner(SharedExecution& execution, int rank) : execution_(execution), rank_(rank) {}

  void give(const std::vector<Case>& cases, int size) {
    for (const Case& one : cases) {
      auto [before, after] = makeWorld(one, size);
      sides_.push_back(std::make_unique<Side>(before[at()]));
      before_.push_back(std::move(before[at()]));
      after_.push_back(std::move(after[at()]));
      operations_.push_back(operationOf(one, *sides_.back()));
    }
  }

  size_t done() const { return done_; }
  bool isThrough() const { return done_ == operations_.size(); }
  // As far as it comes with so many instructions, and so many bytes. True: it has come on.
  bool run(size_t instructions = kAll, size_t bytes = kAll) {
    if (isThrough()) return false;
    if (!begun_) {
      execution_.begin(operations_[done_]);
    } else if (!execution_.mayGoOn()) {
      return false;
    }
    begun_ = true;
    size_t budget = bytes;
    const State state = execution_.run(&budget, instructions);
    EXPECT_NE(state, State::kMismatch) << execution_.how();
    EXPECT_NE(state, State::kNoMemory);
    if (state == State::kDone) {
      begun_ = false;
      ++done_;
    }
    return true;
  }

  // Nothing that lies in its outputs comes from a slot that was being written.
  void check(const std::string& where) const {
    for (size_t number = 0; number < operations_.size(); ++number) {
      const Side& now = *sides_[number];
      ASSERT_EQ(now.inputs, before_[number].inputs) << where << ": an input was written";
      if (number < done_) {
        ASSERT_EQ(now.outputs, after_[number].outputs) << where << ": a wrong result";
        continue;
      }
      for (size_t list = 0; list < now.outputs.size(); ++list) {
        for (size_t i = 0; i < now.outputs[list].size(); ++i) {
          const int32_t found = now.outputs[list][i];
          ASSERT_TRUE(found == before_[number].outputs[list][i] ||
                      found == after_[number].outputs[list][i])
              << where << ": item " << i << " of output " << list << " is neither old nor new";
        }
      }
    }
  }

 private:
  size_t at() const { return static_cast<size_t>(rank_); }

  SharedExecution& execution_;
  const int rank_;
  std::vector<std::unique_ptr<Side>> sides_;
  std::vector<Side> before_;
  std::vector<Side> after_;
  std::vector<Operation> operations_;
  size_t done_ = 0;
  bool begun_ = false;
};

void runAll(std::vector<Runner>& runners, int but = -1) {
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (size_t rank = 0; rank < runners.size(); ++rank) {
      if (static_cast<int>(rank) != but) goes_on = runners[rank].run() || goes_on;
    }
  }
}

struct Stop {
  Case one;
  int victim;
  size_t after;       // so many instructions
  bool others_first;  // they come as far as they can before each of the victim's instructions
};

std::string nameOf(const Stop& stop, int size) {
  return nameOf(stop.one) + ", rank " + std::to_string(stop.victim) + " of " +
         std::to_string(size) + " stops after " + std::to_string(stop.after) + " instructions" +
         (stop.others_first ? ", the others first" : "");
}

// False: the victim was through with the first operation before it had carried out so many.
bool stopAndGoOn(SharedWorld& world, const Stop& stop) {
  const std::string where = nameOf(stop, world.size());
  // What follows is as far as the others come without it.
  Case next = stop.one;
  next.salt += 100;
  std::vector<Runner> runners;
  for (int rank = 0; rank < world.size(); ++rank) {
    runners.emplace_back(world.execution(rank), rank);
    runners.back().give({stop.one, next, {OpKind::kBarrier, 0}}, world.size());
  }
  Runner& victim = runners[static_cast<size_t>(stop.victim)];
  for (size_t done = 0; done < stop.after && !victim.isThrough(); ++done) {
    if (stop.others_first) runAll(runners, stop.victim);
    if (victim.run(1)) continue;
    runAll(runners, stop.victim);
    EXPECT_TRUE(victim.isThrough() || victim.run(1)) << where << ": nobody goes on";
  }
  const bool stopped = victim.done() == 0;
  victim.run(1, 64);  // the beginning of what it copies next
  runAll(runners, stop.victim);
  for (const Runner& runner : runners) runner.check(where);
  runAll(runners);
  for (const Runner& runner : runners) {
    EXPECT_TRUE(runner.isThrough()) << where << ": nobody goes on after it";
    runner.check(where + ", and has gone on");
  }
  return stopped;
}

class SharedStops : public testing::TestWithParam<int> {};

TEST_P(SharedStops, BetweenAnyTwoInstructionsNobodyReadsWhatIsBeingWritten) {
  const int size = GetParam();
  SharedWorld world(size, kSlot, kPlans);
  int salt = 0;
  for (const OpKind kind : kKinds) {
    for (const size_t count : kCounts) {
      for (const int victim : std::set<int>{0, 1, size - 1}) {
        for (const bool others_first : {false, true}) {
          Stop stop{{kind, count, size - 1}, victim, 0, others_first};
          for (bool goes_on = true; goes_on && !HasFailure(); ++stop.after) {
            stop.one.salt = ++salt % 1000;
            goes_on = stopAndGoOn(world, stop);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, SharedStops, testing::Values(2, 3, 4),
                         [](const auto& world) { return std::to_string(world.param); });

// The same with lanes, whose threads wait; the rank that stops is played by an execution.
class SharedStopsOfLanes : public testing::TestWithParam<int> {};

// What each survivor has: done with its result, or failed and left alone.
void checkSurvivor(LaneWorld& world, int rank, OpState& state, Side& side, const Side& after,
                   const std::string& where) {
  SharedLane& lane = world.lane(rank);
  Failure lost;
  lost.kind = FailureKind::kPeerLost;
  world.lifecycle(rank).fail(lost);
  lane.wakeExecutor();
  auto waiting = lane.cancelAll();
  ASSERT_TRUE(lane.awaitLeft(testDeadline())) << where;
  for (auto& [pending, operation] : waiting) pending->complete(world.lifecycle(rank).failure());
  ASSERT_TRUE(state.wait(testDeadline())) << where << ": a survivor still waits";
  if (state.failure() == nullptr) {
    ASSERT_EQ(side.outputs, after.outputs) << where;
  } else {
    ASSERT_EQ(state.failure()->kind, FailureKind::kPeerLost) << where;
  }
}

// False: the victim was through before it had carried out so many.
bool stopForEver(const Stop& stop, int size) {
  const std::string where = nameOf(stop, size);
  LaneWorld world(size);
  auto [sides, after] = makeWorld(stop.one, size);
  std::vector<std::shared_ptr<OpState>> states;
  for (int rank = 0; rank < size; ++rank) {
    states.push_back(std::make_shared<OpState>(world.sharedLifecycle(rank), stop.one.kind, 1,
                                               std::chrono::seconds(100)));
    if (rank == stop.victim) continue;
    world.lane(rank).add(states.back(), operationOf(stop.one, sides[static_cast<size_t>(rank)]));
  }
  SharedBoard board(world.memory(stop.victim), stop.victim, size,
                    [&world](int peer) { world.advanceLater(peer); });
  SharedExecution victim(board, stop.victim, size, plansOf(size), std::make_shared<SharedUse>());
  const Operation operation = operationOf(stop.one, sides[static_cast<size_t>(stop.victim)]);
  victim.begin(operation);
  bool stopped = true;
  for (size_t done = 0; done < stop.after && stopped; ++done) {
    size_t budget = kAll;
    EXPECT_TRUE(waitFor([&] { return victim.mayGoOn(); })) << where;
    stopped = victim.run(&budget, 1) != State::kDone;
  }
  size_t budget = 64;
  if (stopped && victim.mayGoOn()) victim.run(&budget, 1);
  for (int rank = 0; rank < size; ++rank) {
    const auto at = static_cast<size_t>(rank);
    if (rank != stop.victim) checkSurvivor(world, rank, *states[at], sides[at], after[at], where);
  }
  // It thaws after they have left, and finds nobody: nothing of theirs changes.
  const World left = sides;
  size_t rest = kAll;
  if (stopped && victim.mayGoOn()) victim.run(&rest);
  for (int rank = 0; rank < size; ++rank) {
    const auto at = static_cast<size_t>(rank);
    EXPECT_TRUE(rank == stop.victim || sides[at].outputs == left[at].outputs) << where;
  }
  return stopped;
}

TEST_P(SharedStopsOfLanes, EverySurvivorEndsWithItsResultOrTheFailure) {
  const int size = GetParam();
  for (const OpKind kind : kKinds) {
    // Items of 4 bytes: in the line, in a slot, in two chunks.
    for (const size_t count : {size_t{3}, size_t{100}, kLaneSlot / 4 + 10}) {
      Stop stop{{kind, count, size - 1}, 0, 0, false};
      for (bool goes_on = true; goes_on && !HasFailure(); ++stop.after) {
        stop.victim = static_cast<int>(stop.after) % size;
        stop.one.salt = static_cast<int>(stop.after);
        goes_on = stopForEver(stop, size);
      }
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, SharedStopsOfLanes, testing::Values(2, 3, 4),
                         [](const auto& world) { return std::to_string(world.param); });

}  // namespace
}  // namespace torchft_ext
