// A model of who executes what is in a lane's queue (host/shared_lane.h, host/shared_board.h), of
// which all interleavings are looked at: no operation may be left that nobody comes for.
//
// One rank has an issuer of two operations, a thread that waits for one of them and may give up,
// and the loop. Its peer publishes its part of each at any time, and then looks whether it is to
// nudge. A step of the model is a critical section, or an access to what the ranks share.
#include <gtest/gtest.h>

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

namespace torchft_ext {
namespace {

constexpr uint8_t kOperations = 2;

enum class Pc : uint8_t {
  kIdle,
  kDisarm,
  kExecute,
  kArm,
  kLook,
  kRelease,
  kPost,
  kSleep,
  kLeave,
  kGone
};
enum class Stop : uint8_t { kEmpty, kWaits, kTurn };
enum Thread : uint8_t { kIssuer, kWaiter, kLoop, kThreads };

struct Local {
  Pc pc = Pc::kIdle;
  Stop stop = Stop::kEmpty;
  bool comes = false;  // somebody does, for what is left
  auto operator<=>(const Local&) const = default;
};

struct State {
  std::array<Local, kThreads> local;
  uint8_t added = 0;
  uint8_t completed = 0;
  uint8_t published = 0;  // by the peer
  bool peer_looks = false;
  uint8_t waiting = 0;  // not 0: armed, for the so-manieth time
  uint8_t waits = 0;
  uint8_t nudged = 0;  // for which of them
  bool nudge = false;  // on its way to the loop
  bool post = false;   // likewise
  bool posted = false;
  bool owned = false;
  bool asked = false;
  bool left_to_sleepers = false;
  uint8_t sleepers = 0;
  bool gave_up = false;  // the waiter, once
  auto operator<=>(const State&) const = default;

  uint8_t queued() const { return static_cast<uint8_t>(added - completed); }
  bool mayGoOn() const { return published > completed; }
};

enum class Mutation : uint8_t {
  kNone,
  kNoSecondLook,
  kLookBeforeArming,  // as without a fence
  kNoNoteForTheOwner,
  kNothingSaidToSleepers,
  kOneNudgeForAll,  // waits do not differ
  kNoPostAfterATurn
};

class Model {
 public:
  // awaited: by the waiter; 1 is the first operation.
  Model(Mutation mutation, uint8_t awaited) : mutation_(mutation), awaited_(awaited) {}

  // The states in which nobody does anything any more, and something is left.
  size_t stuck() {
    std::vector<State> open{State{}};
    std::set<State> seen{State{}};
    size_t stuck = 0;
    while (!open.empty()) {
      const State state = open.back();
      open.pop_back();
      next_.clear();
      for (uint8_t thread = 0; thread < kThreads; ++thread)
        step(state, static_cast<Thread>(thread));
      stepOfPeer(state);
      if (next_.empty() && state.completed < kOperations) ++stuck;
      for (const State& next : next_) {
        if (seen.insert(next).second) open.push_back(next);
      }
    }
    states_ = seen.size();
    return stuck;
  }
  size_t states() const { return states_; }

 private:
  using Change = std::function<void(State&, Local&)>;

  void add(const State& from, Thread thread, const Change& change) {
    next_.push_back(from);
    change(next_.back(), next_.back().local[thread]);
  }

  void stepOfPeer(const State& from) {
    State next = from;
    if (from.peer_looks) {
      next.peer_looks = false;
      if (from.waiting != 0 && from.waiting != from.nudged) {
        next.nudged = from.waiting;
        next.nudge = true;
      }
    } else if (from.published < kOperations) {
      ++next.published;
      next.peer_looks = true;
    } else {
      return;
    }
    next_.push_back(next);
  }

  void step(const State& from, Thread thread) {
    switch (from.local[thread].pc) {
      case Pc::kIdle:
        if (thread == kIssuer) return issue(from);
        return thread == kLoop ? advance(from) : help(from);
      case Pc::kDisarm:
        return add(from, thread, [](State& state, Local& local) {
          state.waiting = 0;
          local.pc = Pc::kExecute;
        });
      case Pc::kExecute:
        return execute(from, thread);
      case Pc::kArm:
        return add(from, thread, [this](State& state, Local& local) { arm(state, local); });
      case Pc::kLook:
        return add(from, thread, [this](State& state, Local& local) {
          local.comes = !state.mayGoOn() || mutation_ == Mutation::kNoSecondLook;
          local.pc = looksFirst() ? Pc::kArm : Pc::kRelease;
        });
      case Pc::kRelease:
        return add(from, thread, [this](State& state, Local& local) { release(state, local); });
      case Pc::kPost:
        return add(from, thread, [](State& state, Local& local) {
          post(state);
          local.pc = Pc::kIdle;
        });
      case Pc::kSleep:
        return wake(from);
      case Pc::kLeave:
        return add(from, thread, [this](State& state, Local& local) {
          if (!isDone(state) || state.left_to_sleepers) post(state);
          local.pc = Pc::kGone;
        });
      case Pc::kGone:
        return;
    }
  }

  void issue(const State& from) {
    if (from.added == kOperations) return;
    add(from, kIssuer, [](State& state, Local& local) {
      ++state.added;
      if (state.owned) return;
      state.owned = true;
      local.pc = Pc::kDisarm;
    });
  }

  // By a nudge, or by a post.
  void advance(const State& from) {
    for (const bool by_nudge : {true, false}) {
      if (by_nudge ? !from.nudge : !from.post) continue;
      add(from, kLoop, [this, by_nudge](State& state, Local& local) {
        (by_nudge ? state.nudge : state.post) = false;
        state.posted = false;
        state.asked = state.owned && mutation_ != Mutation::kNoNoteForTheOwner;
        if (!state.owned && state.queued() > 0) take(state, local);
      });
    }
  }

  // It waits for its operation once that is issued.
  void help(const State& from) {
    if (from.added < awaited_) return;
    add(from, kWaiter, [this](State& state, Local& local) {
      if (isDone(state)) {
        local.pc = Pc::kLeave;
      } else if (state.owned) {
        ++state.sleepers;
        local.pc = Pc::kSleep;
      } else {
        take(state, local);
      }
    });
  }

  void wake(const State& from) {
    const auto leaves = [](State& state, Local& local, Pc to) {
      --state.sleepers;
      local.pc = to;
    };
    if (!from.owned || isDone(from))
      add(from, kWaiter, [&](State& state, Local& local) { leaves(state, local, Pc::kIdle); });
    add(from, kWaiter, [&](State& state, Local& local) {
      state.gave_up = true;
      leaves(state, local, Pc::kLeave);
    });
  }

  void execute(const State& from, Thread thread) {
    const auto stops = [this, &from, thread](Stop stop) {
      add(from, thread, [this, stop, thread](State& state, Local& local) {
        state.gave_up = state.gave_up || (thread == kWaiter && stop == Stop::kWaits);
        local.stop = stop;
        local.comes = false;
        local.pc = looksFirst() ? Pc::kLook : Pc::kArm;
        if (stop != Stop::kWaits) local.pc = Pc::kRelease;
      });
    };
    if (from.queued() == 0) return stops(Stop::kEmpty);
    if (from.mayGoOn()) {
      if (thread != kWaiter) stops(Stop::kTurn);
      return add(from, thread, [this, thread](State& state, Local& local) {
        ++state.completed;
        if (thread == kWaiter && isDone(state)) {
          local.stop = Stop::kTurn;
          local.comes = false;
          local.pc = Pc::kRelease;
        }
      });
    }
    // The waiter blocks; once it gives the lane back, to look round or for good.
    if (thread != kWaiter || !from.gave_up) stops(Stop::kWaits);
  }

  void arm(State& state, Local& local) const {
    state.waits =
        mutation_ == Mutation::kOneNudgeForAll ? 1 : static_cast<uint8_t>(state.waits + 1);
    state.waiting = state.waits;
    local.pc = looksFirst() ? Pc::kRelease : Pc::kLook;
  }

  void release(State& state, Local& local) const {
    state.owned = false;
    if (state.asked) {
      state.asked = false;
      local.comes = false;
    }
    if (mutation_ == Mutation::kNoPostAfterATurn && local.stop == Stop::kTurn) local.comes = true;
    local.comes = local.comes || state.queued() == 0;
    if (!local.comes && state.sleepers > 0) {
      local.comes = true;
      state.left_to_sleepers = mutation_ != Mutation::kNothingSaidToSleepers;
    }
    local.pc = local.comes ? Pc::kIdle : Pc::kPost;
  }

  static void take(State& state, Local& local) {
    state.owned = true;
    state.left_to_sleepers = false;
    state.waiting = 0;
    local.pc = Pc::kExecute;
  }

  static void post(State& state) {
    if (state.owned || state.queued() == 0 || state.posted) return;
    state.posted = state.post = true;
    state.left_to_sleepers = false;
  }

  bool looksFirst() const { return mutation_ == Mutation::kLookBeforeArming; }
  bool isDone(const State& state) const { return state.completed >= awaited_; }

  const Mutation mutation_;
  const uint8_t awaited_;
  std::vector<State> next_;
  size_t states_ = 0;
};

TEST(SharedLaneModel, SomebodyComesForWhatIsLeft) {
  for (uint8_t awaited = 1; awaited <= kOperations; ++awaited) {
    Model model(Mutation::kNone, awaited);
    EXPECT_EQ(model.stuck(), 0U);
    EXPECT_GT(model.states(), 1000U);
  }
}

class SharedLaneMutations : public testing::TestWithParam<Mutation> {};

TEST_P(SharedLaneMutations, LeaveSomethingThatNobodyComesFor) {
  size_t stuck = 0;
  for (uint8_t awaited = 1; awaited <= kOperations; ++awaited)
    stuck += Model(GetParam(), awaited).stuck();
  EXPECT_GT(stuck, 0U);
}

INSTANTIATE_TEST_SUITE_P(All, SharedLaneMutations,
                         testing::Values(Mutation::kNoSecondLook, Mutation::kLookBeforeArming,
                                         Mutation::kNoNoteForTheOwner,
                                         Mutation::kNothingSaidToSleepers,
                                         Mutation::kOneNudgeForAll, Mutation::kNoPostAfterATurn));

}  // namespace
}  // namespace torchft_ext
