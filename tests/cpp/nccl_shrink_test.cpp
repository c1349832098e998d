// Epochs whose communicators are made out of a failed one's: when all ranks take that road and when
// none does, what ends them in each state, and what is left. Over the NCCL engine and the
// simulator.
#include <gtest/gtest.h>

#include <thread>

#include "base/threads.h"
#include "nccl/heritage.h"
#include "nccl_cluster.h"

namespace torchft_ext {
namespace {

using Values = std::vector<float>;
using Ranks = std::vector<int>;

// ---- engines

void succeed(const std::shared_ptr<OpState>& state) {
  const FailurePtr failure = finish(state);
  ASSERT_EQ(failure, nullptr) << failure->describe();
}

// The sum, and what the last rank has: with other ranks in NCCL than in the group it were
// another's.
void expectRight(Cluster& cluster, const Ranks& which) {
  Cluster::on(which, [&](int i) {
    const Floats values = floats(i, Values(10, 1));
    succeed(cluster.group(i).issue(deviceAllreduce(values)));
    EXPECT_EQ(values->read(), Values(10, static_cast<float>(which.size())));
    const Floats told = floats(i, Values(3, static_cast<float>(i)));
    Operation operation;
    operation.kind = OpKind::kBroadcast;
    operation.root = static_cast<int>(which.size()) - 1;
    operation.outputs = {told->all()};
    succeed(cluster.group(i).issue(onDevice(std::move(operation), {told}, told->device())));
    EXPECT_EQ(told->read(), Values(3, static_cast<float>(which.back())));
  });
}

FailurePtr allreduceFails(Cluster& cluster, int i) {
  const FailurePtr failure =
      finish(cluster.group(i).issue(deviceAllreduce(floats(i, Values(10, 1)))));
  EXPECT_NE(failure, nullptr);
  return failure;
}

NcclEngineOptions shrinking(NcclReinit reinit = NcclReinit::kShrink) {
  NcclEngineOptions options;
  options.reinit = reinit;
  return options;
}

int64_t parked() {
  return sharedNcclThreads()->heritage->parked();
}

class NcclShrink : public NcclTest {
 protected:
  // An epoch of them that has used its devices and then failed; its communicators are parked.
  static void failed(Cluster& cluster, const Ranks& which, const std::string& prefix) {
    cluster.form(which, prefix);
    expectRight(cluster, which);
    endByAbort(cluster, which);
    EXPECT_TRUE(waitFor([&] { return parked() == static_cast<int64_t>(which.size()); }));
  }
  static void endByAbort(Cluster& cluster, const Ranks& which) {
    cluster.group(which.front()).abort("a test said so");
    for (const int i : which)
      EXPECT_TRUE(waitFor([&] { return cluster.group(i).errored() != nullptr; }));
  }
  // Roads taken by all ranks of the epoch that is begun.
  void expectRoad(Cluster& cluster, const Ranks& which, const std::string& prefix,
                  const std::string& road) {
    const int64_t before = counted(road);
    const int64_t ids = counted("unique_ids");
    const int64_t inits = counted("inits");
    const auto size = static_cast<int64_t>(which.size());
    cluster.form(which, prefix);
    expectRight(cluster, which);
    if (road == "inits") {
      EXPECT_EQ(counted("unique_ids"), ids + 1);
      EXPECT_EQ(counted("inits"), inits + size);
    } else {
      EXPECT_EQ(counted("unique_ids"), ids);
      EXPECT_EQ(counted("inits"), inits);
      EXPECT_EQ(counted(road), before + size);
    }
  }
  // All of them begin to shrink and none gets there; `end` ends that once they are at it.
  void endWhileShrinking(Cluster& cluster, const Ranks& which, const std::function<void()>& end) {
    const int64_t before = counted("shrinks");
    std::thread ending([&] {
      EXPECT_TRUE(waitFor(
          [&] { return counted("shrinks") == before + static_cast<int64_t>(which.size()); }));
      end();
    });
    Cluster::on(which, [&](int i) { allreduceFails(cluster, i); });
    ending.join();
  }
  void expectOnlyPlainFromHere(Cluster& cluster, const Ranks& which) {
    inject("clear");
    EXPECT_TRUE(waitFor([] { return parked() == 0; }));
    EXPECT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 0; }));
    expectRoad(cluster, which, "after", "inits");
  }
};

TEST_F(NcclShrink, SurvivorsShrinkWithoutAnIdOrAnInit) {
  NcclCluster cluster(4, shrinking());
  failed(cluster, {0, 1, 2, 3}, "a");
  const int64_t before = sharedNcclThreads()->heritage->inherited();
  expectRoad(cluster, {0, 2, 3}, "b", "shrinks");
  EXPECT_EQ(sharedNcclThreads()->heritage->inherited(), before + 3);
  EXPECT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 4; }))
      << "three in use, and the one that member 1 has parked";
}

TEST_F(NcclShrink, TheyShrinkAgainAndAgainDownToTwo) {
  NcclCluster cluster(4, shrinking());
  failed(cluster, {0, 1, 2, 3}, "a");
  expectRoad(cluster, {1, 2, 3}, "b", "shrinks");
  endByAbort(cluster, {1, 2, 3});
  expectRoad(cluster, {1, 3}, "c", "shrinks");
  endByAbort(cluster, {1, 3});
  expectRoad(cluster, {3}, "d", "inits");
}

TEST_F(NcclShrink, TheSameMembersSplit) {
  NcclCluster cluster(3, shrinking());
  failed(cluster, {2, 0, 1}, "a");
  expectRoad(cluster, {2, 0, 1}, "b", "splits");
}

TEST_F(NcclShrink, AnotherOrderAndNewcomersAreMadePlainly) {
  NcclCluster cluster(4, shrinking());
  failed(cluster, {0, 1, 2}, "a");
  expectRoad(cluster, {1, 0}, "b", "inits");
  cluster.group(0).abort("again");
  EXPECT_TRUE(waitFor([&] { return cluster.group(1).errored() != nullptr; }));
  expectRoad(cluster, {0, 1, 3}, "c", "inits");
  EXPECT_EQ(counted("shrinks") + counted("splits"), 0);
}

TEST_F(NcclShrink, ByDefaultNothingIsParkedOrShrunk) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  expectRight(cluster, cluster.all());
  cluster.group(0).abort("idle");
  EXPECT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 0; }));
  expectRoad(cluster, {0, 1}, "b", "inits");
  EXPECT_EQ(counted("shrinks") + counted("splits"), 0);
}

TEST_F(NcclShrink, ALibraryThatCannotRevokeParksNothing) {
  inject("version 22703");
  NcclCluster cluster(2, shrinking());
  cluster.form(cluster.all(), "a");
  expectRight(cluster, cluster.all());
  cluster.group(0).abort("idle");
  EXPECT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 0; }));
  expectRoad(cluster, cluster.all(), "b", "inits");
}

TEST_F(NcclShrink, AHealthyEpochIsLeftPlainly) {
  NcclCluster cluster(3, shrinking());
  cluster.form(cluster.all(), "a");
  expectRight(cluster, cluster.all());
  expectRoad(cluster, {0, 1, 2}, "b", "inits");
  EXPECT_EQ(counted("splits"), 0);
}

TEST_F(NcclShrink, WhereOneRankDoesNotWantToAllGoPlainly) {
  int made = 0;
  Cluster cluster(3, loopbackOptions(), [&](std::shared_ptr<Engine> host) {
    const NcclReinit reinit = made++ == 1 ? NcclReinit::kPlain : NcclReinit::kShrink;
    return makeNcclEngine(sim::platform(), std::move(host), shrinking(reinit));
  });
  cluster.form(cluster.all(), "a");
  expectRight(cluster, cluster.all());
  endByAbort(cluster, cluster.all());
  EXPECT_TRUE(waitFor([] { return parked() == 2; }));
  expectRoad(cluster, {0, 1, 2}, "b", "inits");
  EXPECT_EQ(counted("splits"), 0);
  EXPECT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 3; }));
}

TEST_F(NcclShrink, WhereOneRankWasAtWorkInNcclAllGoPlainly) {
  NcclCluster cluster(3, shrinking());
  cluster.form(cluster.all(), "a");
  expectRight(cluster, cluster.all());
  const int64_t before = counted("allreduce");
  inject("in_progress allreduce rank=0 polls=1000000000");
  std::thread aborting([&] {
    EXPECT_TRUE(waitFor([&] { return counted("allreduce") == before + 1; }));
    cluster.group(2).abort("while it is in progress");
  });
  allreduceFails(cluster, 0);
  aborting.join();
  inject("clear");
  expectRoad(cluster, {0, 1}, "b", "inits");
  EXPECT_EQ(counted("shrinks"), 0);
}

TEST_F(NcclShrink, AnEpochThatFailsBeforeItUsesADeviceLeavesTheParentForTheNext) {
  NcclCluster cluster(4, shrinking());
  failed(cluster, {0, 1, 2, 3}, "a");
  cluster.form({0, 1, 2}, "b");
  endByAbort(cluster, {0, 1, 2});
  expectRoad(cluster, {0, 2}, "c", "shrinks");
}

TEST_F(NcclShrink, EachDeviceOfAMemberHasAParentOfItsOwn) {
  NcclCluster cluster(2, shrinking());
  const auto onBoth = [&](bool swapped) {
    cluster.onAll([&](int i) {
      for (const int offset : {0, 2}) {
        const Floats values = floats(i + (swapped ? 2 - offset : offset), Values(4, 1));
        succeed(cluster.group(i).issue(deviceAllreduce(values)));
        EXPECT_EQ(values->read(), Values(4, 2));
      }
    });
  };
  cluster.form({0, 1}, "a");
  onBoth(false);
  endByAbort(cluster, {0, 1});
  EXPECT_TRUE(waitFor([] { return parked() == 4; }));
  cluster.form({0, 1}, "b");
  onBoth(true);
  EXPECT_EQ(counted("splits"), 4);
}

TEST_F(NcclShrink, TheParentsOfOneEpochAreToldApartByTheOrderOfTheirMaking) {
  NcclCluster cluster(2, shrinking());
  const auto reduceOn = [&](int first, int second) {
    cluster.onAll([&](int i) {
      const Floats values = floats(i == 0 ? first : second, Values(4, 1));
      succeed(cluster.group(i).issue(deviceAllreduce(values)));
      EXPECT_EQ(values->read(), Values(4, 2));
    });
  };
  cluster.form({0, 1}, "a");
  reduceOn(0, 1);
  reduceOn(2, 3);
  endByAbort(cluster, {0, 1});
  EXPECT_TRUE(waitFor([] { return parked() == 4; }));
  cluster.form({0, 1}, "b");
  reduceOn(0, 3);  // of two different communicators, both of all ranks
  EXPECT_EQ(counted("splits"), 0);
}

// ---- what ends them

TEST_F(NcclShrink, TheEndOfTheGroupsFreesWhatIsParked) {
  NcclCluster cluster(3, shrinking());
  failed(cluster, {0, 1, 2}, "a");
  EXPECT_EQ(sim::ncclCensus().communicators, 3);
  for (auto& member : cluster.members) member.reset();
  EXPECT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 0; }));
}

TEST_F(NcclShrink, TheEndOfTheThreadsFreesWhatIsParked) {
  NcclCluster cluster(2, shrinking());
  failed(cluster, {0, 1}, "a");
  EXPECT_TRUE(stopNcclEngines(testDeadline()));
  EXPECT_EQ(sim::ncclCensus().communicators, 0);
}

TEST_F(NcclShrink, WhatNobodyTakesIsFreedAfterItsTime) {
  setParkedForTest(milliseconds(200));
  NcclCluster cluster(2, shrinking());
  cluster.form({0, 1}, "a");
  expectRight(cluster, {0, 1});
  cluster.group(0).abort("idle");
  EXPECT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 0; }));
  setParkedForTest(kParkedFor);
  expectRoad(cluster, {0, 1}, "b", "inits");
}

TEST_F(NcclShrink, AbortWhileItHangs) {
  NcclCluster cluster(3, shrinking());
  failed(cluster, {0, 1, 2}, "a");
  inject("hang shrink count=-1");
  cluster.form({0, 2}, "b");
  endWhileShrinking(cluster, {0, 2}, [&] { cluster.group(2).abort("it hangs"); });
  EXPECT_TRUE(waitFor([] { return counted("aborts") >= 4; }));
  cluster.members[1].reset();
  expectOnlyPlainFromHere(cluster, {0, 2});
}

TEST_F(NcclShrink, AbortWhileOthersAwaitTheLastRanksVote) {
  NcclCluster cluster(4, shrinking());
  failed(cluster, {0, 1, 2, 3}, "a");
  cluster.members[1].reset();
  inject("hang shrink rank=2");
  cluster.form({0, 2, 3}, "b");
  const int64_t allreduces = counted("allreduce");
  endWhileShrinking(cluster, {0, 2, 3}, [&] {
    EXPECT_TRUE(waitFor([&] { return counted("births") == 2; }));
    cluster.group(0).abort("one is missing");
  });
  EXPECT_EQ(counted("allreduce"), allreduces) << "used before all ranks had it";
  expectOnlyPlainFromHere(cluster, {0, 2, 3});
}

TEST_F(NcclShrink, OneThatFailsFailsTheEpochAndTheNextIsMadePlainly) {
  NcclCluster cluster(3, shrinking());
  failed(cluster, {0, 1, 2}, "a");
  cluster.members[1].reset();
  inject("async_error shrink rank=2 code=6");
  cluster.form({0, 2}, "b");
  Cluster::on({0, 2}, [&](int i) {
    const FailurePtr failure = allreduceFails(cluster, i);
    if (!failure) return;
    EXPECT_EQ(failure->kind, FailureKind::kLinkLost) << failure->describe();
    EXPECT_NE(failure->describe().find("shrinking an earlier epoch's"), std::string::npos)
        << failure->describe();
  });
  expectOnlyPlainFromHere(cluster, {0, 2});
}

TEST_F(NcclShrink, ACallThatIsRefusedFailsTheEpochToo) {
  NcclCluster cluster(3, shrinking());
  failed(cluster, {0, 1, 2}, "a");
  cluster.members[1].reset();
  inject("fail shrink rank=0 code=5");
  cluster.form({0, 2}, "b");
  Cluster::on({0, 2}, [&](int i) { allreduceFails(cluster, i); });
  expectOnlyPlainFromHere(cluster, {0, 2});
}

TEST_F(NcclShrink, TheDeadlineEndsOneThatHangs) {
  NcclCluster cluster(3, shrinking());
  failed(cluster, {0, 1, 2}, "a");
  cluster.members[1].reset();
  inject("hang shrink count=-1");
  cluster.form({0, 2}, "b");
  Cluster::on({0, 2}, [&](int i) {
    Operation hurried = deviceAllreduce(floats(i, Values(10, 1)));
    hurried.timeout = milliseconds(200);
    const FailurePtr failure = finish(cluster.group(i).issue(std::move(hurried)));
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kTimeout) << failure->describe();
  });
  expectOnlyPlainFromHere(cluster, {0, 2});
}

TEST_F(NcclShrink, AMemberThatIsLostWhileTheOthersMeetReleasesThem) {
  NcclCluster cluster(4, shrinking());
  failed(cluster, {0, 1, 2, 3}, "a");
  cluster.members[1].reset();
  cluster.form({0, 2, 3}, "b");
  std::thread dying([&] {
    EXPECT_TRUE(waitFor([&] { return parked() == 1; }));  // member 3's own
    cluster.members[3].reset();
  });
  Cluster::on({0, 2}, [&](int i) {
    const FailurePtr failure = allreduceFails(cluster, i);
    if (failure) {
      EXPECT_EQ(failure->cause.rank, 2) << failure->describe();
    }
  });
  dying.join();
  expectOnlyPlainFromHere(cluster, {0, 2});
}

TEST_F(NcclShrink, AGoodbyeAfterItIsAsAfterAnInit) {
  NcclCluster cluster(3, shrinking());
  failed(cluster, {0, 1, 2}, "a");
  cluster.members[1].reset();
  expectRoad(cluster, {0, 2}, "b", "shrinks");
  Cluster::on({0, 2}, [&](int i) { EXPECT_TRUE(cluster.group(i).shutdown(testDeadline())); });
  EXPECT_EQ(counted("finalizes"), 2);
  EXPECT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 0; }));
}

TEST_F(NcclShrink, SlowAnswersAreWaitedFor) {
  NcclCluster cluster(3, shrinking());
  failed(cluster, {0, 1, 2}, "a");
  inject("in_progress shrink rank=0 polls=50");
  inject("delay shrink rank=2 ms=30");
  expectRoad(cluster, {0, 2}, "b", "shrinks");
}

// ---- leaks

TEST_F(NcclShrink, OneHundredEpochsOfThemLeaveThreadsAndMemoryFlat) {
  NcclCluster cluster(3, shrinking());
  size_t threads = 0;
  size_t memory = 0;
  for (int epoch = 0; epoch < 100; ++epoch) {
    // By turns: newly made, split, shrunk; every ninth hangs while it is shrunk.
    const Ranks which = epoch % 3 == 2 ? Ranks{0, 2} : Ranks{0, 1, 2};
    if (epoch % 9 == 8) inject("hang shrink rank=2");
    cluster.form(which, "same");
    if (epoch % 9 == 8) {
      endWhileShrinking(cluster, which, [&] { cluster.group(0).abort("it hangs"); });
      inject("clear");
    } else {
      expectRight(cluster, which);
    }
    endByAbort(cluster, which);
    if (epoch % 33 != 0) continue;
    ASSERT_TRUE(waitFor([] { return sim::ncclCensus().communicators == 3 && parked() == 3; }));
    if (epoch > 33) {
      EXPECT_TRUE(waitFor([&] { return threadCensus().running.size() <= threads; }));
      EXPECT_TRUE(waitFor([&] { return sim::liveAllocations() <= memory; }));
    } else {
      threads = threadCensus().running.size();
      memory = sim::liveAllocations();
    }
  }
  EXPECT_GT(counted("shrinks"), 60);
  EXPECT_GT(counted("splits"), 90);
  EXPECT_EQ(sim::ncclCensus().roots, 0);
}

}  // namespace
}  // namespace torchft_ext
