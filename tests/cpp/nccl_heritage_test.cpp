// From which communicator another may be made, and what is parked until then: against a scripted
// NCCL. And that the simulator does not let pass what NCCL forbids there.
#include <gtest/gtest.h>

#include "nccl/heritage.h"
#include "nccl/lineage.h"
#include "nccl_cluster.h"
#include "scripted_nccl.h"

namespace torchft_ext {
namespace {

using Ranks = std::vector<int>;

// ---- which way leads from one membership to another

std::vector<Incarnation> processes(const Ranks& which) {
  std::vector<Incarnation> members;
  for (const int i : which) {
    Incarnation one;
    one.bytes[0] = static_cast<uint8_t>(i + 1);
    members.push_back(one);
  }
  return members;
}
std::optional<Ranks> way(const Ranks& old, const Ranks& now) {
  return leftOut(processes(old), processes(now));
}

TEST(NcclLineage, WhoWentIsLeftOutByItsOldRank) {
  EXPECT_EQ(way({5, 6, 7, 8}, {5, 7, 8}), Ranks({1}));
  EXPECT_EQ(way({5, 6, 7, 8}, {6, 8}), Ranks({0, 2}));
  EXPECT_EQ(way({5, 6, 7, 8}, {5, 6}), Ranks({2, 3}));
}

TEST(NcclLineage, TheSameMembersLeaveNobodyOut) {
  EXPECT_EQ(way({5, 6, 7}, {5, 6, 7}), Ranks());
}

TEST(NcclLineage, NoWayLeadsToNewcomersAnotherOrderOrOneAlone) {
  EXPECT_EQ(way({5, 6, 7}, {5, 6, 8}), std::nullopt);
  EXPECT_EQ(way({5, 6}, {5, 6, 7}), std::nullopt);
  EXPECT_EQ(way({5, 6, 7}, {6, 5}), std::nullopt);
  EXPECT_EQ(way({5, 6, 7}, {7, 6, 5}), std::nullopt);
  EXPECT_EQ(way({5, 6, 7}, {6}), std::nullopt);
  EXPECT_EQ(way({}, {}), std::nullopt);
}

TEST(NcclLineage, NoWayLeadsWhereOneProcessIsTwoRanks) {
  EXPECT_EQ(way({5, 5, 6}, {5, 6}), std::nullopt);
  EXPECT_EQ(way({5, 6, 7}, {6, 6}), std::nullopt);
}

TEST(NcclLineage, EachCommunicatorOfAnEpochHasAnIdOfItsOwnAndNoneIsZero) {
  EXPECT_NE(lineageId(Nonce{}), 0U);
  const uint64_t first = lineageId(Nonce::random());
  EXPECT_EQ(nthOfEpoch(first, 0), first);
  EXPECT_NE(nthOfEpoch(first, 1), first);
  EXPECT_NE(nthOfEpoch(first, 1), nthOfEpoch(first, 2));
  EXPECT_NE(nthOfEpoch(uint64_t{0} - 0x9e3779b97f4a7c15, 1), 0U);
}

// ---- what is parked, and how a pair ends

class NcclHeritage : public testing::Test {
 protected:
  std::shared_ptr<DeviceComm> comm(const std::shared_ptr<const int>& heir) {
    auto platform = std::make_shared<NcclPlatform>(*sim::platform());
    platform->nccl = nccl;
    DeviceCommSetup setup{platform, lifecycle, deviceOf(0), 0, 3, "c", false};
    setup.lineage = std::make_shared<Lineage>(Lineage{processes({0, 1, 2}), 7, heir});
    auto made = std::make_shared<DeviceComm>(std::move(setup));
    EXPECT_TRUE(made->initialise({}, testDeadline()));
    return made;
  }
  void failEpoch(bool needs_new_group = false) {
    Failure failure = lifecycle->ownFailure(FailureKind::kAborted, "a test said so");
    failure.needs_new_group = needs_new_group;
    lifecycle->fail(std::move(failure));
  }
  void makeReaper(Duration parked_for = kParkedFor) {
    heritage = std::make_shared<Heritage>(parked_for);
    reaper = std::make_unique<CommReaper>([] {}, kTestPatience, heritage);
  }
  std::vector<std::string> ending() const {
    return nccl->callsBut({"init", "asyncError", "revoke"});
  }
  bool isParked(int64_t count = 1) {
    return waitFor([&] { return heritage->parked() == count; });
  }

  std::shared_ptr<ScriptedNccl> nccl = std::make_shared<ScriptedNccl>();
  std::shared_ptr<Lifecycle> lifecycle =
      std::make_shared<Lifecycle>(EpochIdentity{"scripted", 1, 0, 3});
  std::shared_ptr<const int> heir = std::make_shared<const int>();
  std::shared_ptr<Heritage> heritage;
  std::unique_ptr<CommReaper> reaper;
};

TEST_F(NcclHeritage, OneThatIsParkedIsAtRestAndIsHandedOutOnceToItsEngineAndDevice) {
  makeReaper();
  const auto only = comm(heir);
  failEpoch();
  reaper->abort({only});
  ASSERT_TRUE(isParked());
  EXPECT_TRUE(only->awaitCut(testDeadline()));
  EXPECT_TRUE(only->awaitRest(testDeadline()));
  EXPECT_FALSE(only->gone());
  EXPECT_TRUE(reaper->awaitEnded(deviceOf(0), testDeadline()));
  EXPECT_EQ(reaper->counts().live, 0);
  EXPECT_EQ(heritage->claim(std::make_shared<const int>(), deviceOf(0)), nullptr);
  EXPECT_EQ(heritage->claim(heir, deviceOf(1)), nullptr);
  EXPECT_EQ(heritage->claim(heir, deviceOf(0)), only);
  EXPECT_EQ(heritage->claim(heir, deviceOf(0)), nullptr);
  reaper->abort({only});
  EXPECT_TRUE(only->awaitGone(testDeadline()));
  EXPECT_TRUE(reaper->stop(testDeadline()));
  EXPECT_EQ(reaper->counts().aborted, 1);
  EXPECT_EQ(nccl->callsBut({"init", "asyncError"}).front(), "revoke 1");
  EXPECT_EQ(ending().back(), "groupEnd");
}

TEST_F(NcclHeritage, WhatIsInErrorAfterItsRevokeIsAborted) {
  makeReaper();
  const auto broken = comm(heir);
  failEpoch();
  nccl->answer("asyncError", {NcclResult::kSuccess, NcclResult::kRemoteError});
  reaper->abort({broken});
  EXPECT_TRUE(broken->awaitGone(testDeadline()));
  EXPECT_EQ(heritage->parked(), 0);
  reaper->stop(testDeadline());
}

TEST_F(NcclHeritage, NothingIsParkedForAGroupThatIsGone) {
  makeReaper();
  const auto only = comm(heir);
  failEpoch(/*needs_new_group=*/true);
  reaper->abort({only});
  EXPECT_TRUE(only->awaitGone(testDeadline()));
  reaper->stop(testDeadline());
}

TEST_F(NcclHeritage, AReplacedOneIsAborted) {
  makeReaper();
  const auto first = comm(heir);
  const auto second = comm(heir);
  failEpoch();
  reaper->abort({first});
  ASSERT_TRUE(isParked());
  reaper->abort({second});
  EXPECT_TRUE(first->awaitGone(testDeadline()));
  EXPECT_TRUE(isParked());
  EXPECT_EQ(heritage->claim(heir, deviceOf(0)), second);
  reaper->abort({second});
  EXPECT_TRUE(reaper->stop(testDeadline()));
  EXPECT_TRUE(second->gone());
  EXPECT_EQ(reaper->counts().aborted, 2);
}

TEST_F(NcclHeritage, AfterItsTimeItIsAborted) {
  makeReaper(milliseconds(20));
  const auto only = comm(heir);
  failEpoch();
  reaper->abort({only});
  EXPECT_TRUE(only->awaitGone(testDeadline()));
  EXPECT_EQ(heritage->parked(), 0);
  reaper->stop(testDeadline());
}

TEST_F(NcclHeritage, TheEndOfTheEngineAndTheEndOfTheReaperAbortIt) {
  makeReaper();
  const auto orphan = comm(heir);
  const auto other_heir = std::make_shared<const int>();
  const auto last = comm(other_heir);
  failEpoch();
  reaper->abort({orphan});
  ASSERT_TRUE(isParked());
  heir.reset();
  reaper->lookAtHeritage();
  EXPECT_TRUE(orphan->awaitGone(testDeadline()));
  reaper->abort({last});
  ASSERT_TRUE(isParked());
  EXPECT_TRUE(reaper->stop(testDeadline()));
  EXPECT_TRUE(last->gone());
  EXPECT_FALSE(heritage->park(last));
}

TEST_F(NcclHeritage, OneThatIsBeingMadeIsAbortedAfterItsParent) {
  makeReaper();
  auto parent = comm(heir);
  const auto child = std::make_shared<DeviceComm>(parent->setup());
  nccl->answer("asyncError", std::deque<NcclResult>(100000, NcclResult::kInProgress));
  EXPECT_FALSE(child->initialiseFrom(parent, {1}, Deadline::after(milliseconds(20))));
  EXPECT_EQ(parent, nullptr);
  EXPECT_EQ(nccl->calls().back(), "asyncError 1");  // the parent's state is what is asked for
  failEpoch();
  reaper->abort({child});
  EXPECT_TRUE(child->awaitGone(testDeadline()));
  EXPECT_EQ(ending(), std::vector<std::string>({"shrink 1", "groupStart", "abort 1", "groupEnd",
                                                "groupStart", "abort 2", "groupEnd"}));
  EXPECT_TRUE(reaper->stop(testDeadline()));
  EXPECT_EQ(reaper->counts().aborted, 2);
}

// ---- the simulator

class NcclSimulatedShrink : public testing::Test {
 protected:
  void SetUp() override {
    sim::Faults::instance().reset();
    NcclUniqueId id;
    nccl.getUniqueId(&id);
    nccl.init(&parent, {0, 1, {id}});
    settle();
  }
  void TearDown() override {
    nccl.abort(parent);
    sim::Faults::instance().reset();
  }
  NcclResult settle() {
    NcclResult state = NcclResult::kInProgress;
    EXPECT_TRUE(waitFor([&] {
      nccl.asyncError(parent, &state);
      return state != NcclResult::kInProgress;
    }));
    return state;
  }
  static size_t violations() { return sim::Faults::instance().violations().size(); }

  NcclApi& nccl = *sim::platform()->nccl;
  NcclComm parent = nullptr;
  NcclComm child = nullptr;
};

TEST_F(NcclSimulatedShrink, WrongListsAreViolations) {
  for (const Ranks& wrong : {Ranks{}, Ranks{0}, Ranks{1}, Ranks{-1}}) {
    const size_t before = violations();
    EXPECT_EQ(nccl.shrink(parent, wrong, false, &child), NcclResult::kInvalidArgument);
    EXPECT_EQ(violations(), before + 1);
  }
}

TEST_F(NcclSimulatedShrink, TheParentTellsTheEndAndTheHandleComesWithIt) {
  nccl.revoke(parent);
  ASSERT_EQ(nccl.split(parent, 0, 0, &child), NcclResult::kInProgress);
  EXPECT_EQ(child, nullptr);
  NcclComm second = nullptr;
  EXPECT_NE(nccl.split(parent, 0, 0, &second), NcclResult::kInProgress);
  EXPECT_EQ(violations(), 1U) << "a call while it is in progress";
  EXPECT_EQ(settle(), NcclResult::kSuccess);
  ASSERT_NE(child, nullptr);
  nccl.abort(child);
  EXPECT_EQ(violations(), 1U);
}

TEST_F(NcclSimulatedShrink, AFailedOneLeavesAHandleForAfterTheParentAndNoSecondTry) {
  nccl.revoke(parent);
  sim::Faults::instance().inject("async_error split code=6");
  ASSERT_EQ(nccl.split(parent, 0, 0, &child), NcclResult::kInProgress);
  EXPECT_EQ(settle(), NcclResult::kRemoteError);
  ASSERT_NE(child, nullptr);
  NcclComm second = nullptr;
  EXPECT_EQ(nccl.split(parent, 0, 0, &second), NcclResult::kInvalidArgument);
  EXPECT_EQ(violations(), 1U);
  nccl.abort(child);
  EXPECT_EQ(violations(), 2U) << "before its parent";
}

}  // namespace
}  // namespace torchft_ext
