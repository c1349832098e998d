// One communicator and its end, against a scripted NCCL: order of calls, blocked calls, limits.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cpp/nccl/scripted_nccl.h"
#include "cpp/support/wait_for.h"
#include "nccl/comm_reaper.h"
#include "sim.h"

namespace torchft_ext {
namespace {

using Calls = std::vector<std::string>;

class NcclReaper : public testing::Test {
 protected:
  std::shared_ptr<DeviceComm> comm(const std::string& name = "c") {
    auto platform = std::make_shared<NcclPlatform>(*sim::platform());
    platform->nccl = nccl;
    DeviceCommSetup setup{platform, lifecycle, c10::Device(c10::DeviceType::PrivateUse1, 0), 0, 2,
                          name,     false};
    setup.left = left;
    return std::make_shared<DeviceComm>(setup);
  }
  std::shared_ptr<DeviceComm> readyComm(const std::string& name = "c") {
    auto made = comm(name);
    EXPECT_TRUE(made->initialise({}, testDeadline()));
    return made;
  }
  std::unique_ptr<CommReaper> reaper(Duration limit = kTestPatience) {
    return std::make_unique<CommReaper>([this] { ++cuts; }, limit);
  }
  // What ends communicators, without what looks at them.
  Calls ending() const { return nccl->callsBut({"init", "asyncError", "getUniqueId"}); }
  void TearDown() override { nccl->unblock(); }

  std::shared_ptr<ScriptedNccl> nccl = std::make_shared<ScriptedNccl>();
  std::shared_ptr<Lifecycle> lifecycle =
      std::make_shared<Lifecycle>(GenerationIdentity{"scripted", 1, 0, 2});
  std::shared_ptr<PeersLeft> left = std::make_shared<PeersLeft>();
  std::atomic<int> cuts{0};
};

TEST_F(NcclReaper, RevokesAllBeforeItAbortsAllInOneGroup) {
  const auto first = readyComm();
  const auto second = readyComm();
  auto ends = reaper();
  ends->abort({first, second});
  ASSERT_TRUE(first->awaitGone(testDeadline()));
  ASSERT_TRUE(second->awaitGone(testDeadline()));
  EXPECT_EQ(ending(),
            Calls({"revoke 1", "revoke 2", "groupStart", "abort 1", "abort 2", "groupEnd"}));
  EXPECT_TRUE(ends->stop(testDeadline()));
  EXPECT_EQ(ends->counts().aborted, 2);
}

TEST_F(NcclReaper, WithoutRevokeWaitersAreReleasedWhileTheAbortIsUnderWay) {
  nccl->lack(NcclFeature::kRevoke);
  const auto only = readyComm();
  nccl->block("groupEnd");
  auto ends = reaper();
  ends->abort({only});
  EXPECT_TRUE(only->awaitCut(testDeadline()));
  EXPECT_FALSE(only->gone());
  EXPECT_EQ(ending().at(1), "abort 1");
  nccl->unblock();
  EXPECT_TRUE(only->awaitGone(testDeadline()));
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, AStuckAbortIsReportedAndHoldsUpNobody) {
  nccl->block("groupEnd");
  const auto stuck = readyComm();
  auto ends = reaper(milliseconds(50));
  const int before = threadSnapshot().stuck;
  ends->abort({stuck});
  ASSERT_TRUE(waitFor([&] { return ends->counts().stuck == 1; }));
  EXPECT_EQ(threadSnapshot().stuck, before + 1);
  EXPECT_TRUE(stuck->cut());
  const auto next = readyComm();
  ends->abort({next});
  EXPECT_TRUE(next->awaitCut(testDeadline()));
  nccl->unblock();
  EXPECT_TRUE(next->awaitGone(testDeadline()));
  EXPECT_TRUE(stuck->awaitGone(testDeadline()));
  EXPECT_TRUE(waitFor([&] { return threadSnapshot().stuck == before; }));
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, ACallThatDoesNotReturnHoldsUpItsOwnCommunicatorAlone) {
  const auto busy = readyComm();
  const auto idle = readyComm();
  ASSERT_TRUE(busy->gate().tryEnter());  // as a call that does not return
  auto ends = reaper();
  ends->abort({busy, idle});
  EXPECT_TRUE(idle->awaitGone(testDeadline()));
  EXPECT_TRUE(busy->awaitCut(testDeadline()));
  EXPECT_FALSE(nccl->called("abort 1"));
  busy->gate().leave();
  EXPECT_TRUE(busy->awaitGone(testDeadline()));
  EXPECT_TRUE(nccl->called("abort 1"));
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, ACallThatReturnsAfterItsLimitStillFreesItsCommunicator) {
  const auto busy = readyComm();
  ASSERT_TRUE(busy->gate().tryEnter());
  auto ends = reaper(milliseconds(50));
  ends->abort({busy});
  EXPECT_TRUE(waitFor([&] { return ends->counts().stuck == 1; }));
  EXPECT_FALSE(nccl->called("abort 1"));
  busy->gate().leave();
  EXPECT_TRUE(busy->awaitGone(testDeadline()));
  EXPECT_TRUE(waitFor([&] { return ends->counts().aborted == 1; }));
  ends->stop(testDeadline());
}

// NCCL frees it when the graph is gone: until then its helper waits, which is not "stuck".
TEST_F(NcclReaper, ACapturedCommunicatorIsAbortedAndWaitsForItsGraphAlone) {
  const auto captured = readyComm();
  captured->markCaptured(captured->stream());
  nccl->block("groupEnd");
  auto ends = reaper(milliseconds(50));
  ends->abort({captured});
  ASSERT_TRUE(waitFor([&] { return nccl->called("groupEnd"); }));
  EXPECT_EQ(ending(), Calls({"groupStart", "abort 1", "groupEnd"}));  // a revoke would not wait
  EXPECT_TRUE(captured->cut());
  EXPECT_TRUE(waitFor([&] { return ends->counts().held_by_graphs == 1; }));
  EXPECT_TRUE(ends->awaitEnded(captured->setup().device, testDeadline()));
  nccl->unblock();  // the graph is gone
  EXPECT_TRUE(captured->awaitGone(testDeadline()));
  EXPECT_TRUE(waitFor([&] { return ends->counts().aborted == 1; }));
  EXPECT_TRUE(ends->stop(testDeadline()));
  EXPECT_EQ(ends->counts().held_by_graphs, 0);
  EXPECT_EQ(ends->counts().stuck, 0);
}

TEST_F(NcclReaper, ARevokeInProgressIsThroughBeforeTheAbort) {
  const auto first = readyComm();
  const auto second = readyComm();
  std::deque<NcclResult> states(22, NcclResult::kInProgress);
  states[0] = states[1] = NcclResult::kSuccess;  // before the revokes
  nccl->answer("asyncError", states);
  auto ends = reaper();
  ends->abort({first, second});
  ASSERT_TRUE(second->awaitGone(testDeadline()));
  const auto calls = nccl->callsBut({"init", "getUniqueId"});
  const auto abort = std::find(calls.begin(), calls.end(), "abort 1");
  EXPECT_GE(std::count(calls.begin(), abort, "asyncError 1"), 21);
  EXPECT_EQ(std::count(abort, calls.end(), "asyncError 1"), 0);
  ends->stop(testDeadline());
}

// NCCL would use the job of the call that is in progress after it has freed it.
TEST_F(NcclReaper, OneAtWorkIsNotRevokedAndAbortedBeforeThoseThatWere) {
  const auto quiet = readyComm();
  const auto at_work = readyComm();
  nccl->answer("asyncError", {NcclResult::kSuccess, NcclResult::kInProgress});
  auto ends = reaper();
  ends->abort({quiet, at_work});
  ASSERT_TRUE(quiet->awaitGone(testDeadline()));
  EXPECT_EQ(ending(), Calls({"revoke 1", "groupStart", "abort 2", "abort 1", "groupEnd"}));
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, WhatCannotBeRevokedIsToldToStopWhileRevokesAreUnderWay) {
  const auto quiet = readyComm();
  const auto at_work = readyComm();
  std::deque<NcclResult> states(22, NcclResult::kInProgress);
  states[0] = NcclResult::kSuccess;  // of the quiet one, before its revoke
  nccl->answer("asyncError", states);
  auto ends = reaper();
  ends->abort({quiet, at_work});
  ASSERT_TRUE(quiet->awaitGone(testDeadline()));
  const auto calls = nccl->callsBut({"init", "getUniqueId"});
  const auto told = std::find(calls.begin(), calls.end(), "abort 2");
  EXPECT_EQ(std::count(std::find(calls.begin(), told, "revoke 1"), told, "asyncError 1"), 0);
  EXPECT_GE(std::count(told, calls.end(), "asyncError 1"), 20);
  EXPECT_EQ(calls.back(), "groupEnd");
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, OneInErrorIsNotRevoked) {
  const auto broken = readyComm();
  nccl->answer("asyncError", {NcclResult::kRemoteError});
  auto ends = reaper();
  ends->abort({broken});
  ASSERT_TRUE(broken->awaitGone(testDeadline()));
  EXPECT_EQ(ending(), Calls({"groupStart", "abort 1", "groupEnd"}));
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, WhoWantsRoomOnADeviceWaitsForWhatIsBeingEndedThere) {
  const auto only = readyComm();
  const c10::Device device = only->setup().device;
  const c10::Device another(device.type(), 1);
  nccl->block("groupEnd");
  auto ends = reaper();
  ends->abort({only});
  ASSERT_TRUE(waitFor([&] { return nccl->called("groupEnd"); }));
  EXPECT_FALSE(ends->awaitEnded(device, Deadline::after(milliseconds(20))));
  EXPECT_TRUE(ends->awaitEnded(another, testDeadline()));
  nccl->unblock();
  EXPECT_TRUE(ends->awaitEnded(device, testDeadline()));
  ends->stop(testDeadline());
}

// A stream that user code was given in between is nobody's here.
TEST_F(NcclReaper, LiveCommunicatorsHaveStreamsOfTheirOwnAndGiveThemBack) {
  auto first = comm();
  const c10::Stream own = first->stream();
  std::vector<std::shared_ptr<DeviceComm>> others;
  const auto* guard = c10::impl::getDeviceGuardImpl(own.device_type());
  // How many takes of the pool's streams until it gives out the first one's again.
  const auto takesUntilOwn = [&] {
    int takes = 1;
    while (guard->getStreamFromGlobalPool(own.device()) != own) ++takes;
    return takes;
  };
  takesUntilOwn();
  const int around = takesUntilOwn();
  for (int i = 0; i < 7; ++i) {
    takesUntilOwn();
    for (int take = 1; take < around; ++take) guard->getStreamFromGlobalPool(own.device());
    others.push_back(comm());  // whom the pool would give it to
    EXPECT_NE(others.back()->stream(), own);
    for (int j = 0; j < i; ++j)
      EXPECT_NE(others.back()->stream(), others[static_cast<size_t>(j)]->stream());
  }
  first.reset();
  EXPECT_EQ(comm()->stream(), own);
}

TEST_F(NcclReaper, WithoutRevokeACapturedCommunicatorIsAbortedAlone) {
  nccl->lack(NcclFeature::kRevoke);
  const auto captured = readyComm();
  captured->markCaptured(captured->stream());
  const auto other = readyComm();
  auto ends = reaper();
  ends->abort({captured, other});
  EXPECT_TRUE(other->awaitGone(testDeadline()));
  EXPECT_TRUE(captured->awaitGone(testDeadline()));
  EXPECT_EQ(ending().size(), 6u);  // two groups
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, RetiringFinalizesThenDestroys) {
  const auto only = readyComm();
  nccl->answer("asyncError", {NcclResult::kInProgress, NcclResult::kInProgress});
  auto ends = reaper();
  ends->retire({only}, testDeadline());
  EXPECT_TRUE(only->awaitGone(testDeadline()));
  EXPECT_EQ(ending(), Calls({"finalize 1", "groupStart", "destroy 1", "groupEnd"}));
  ends->stop(testDeadline());
}

// Destroying it would leave NCCL's group open on the helper's thread.
TEST_F(NcclReaper, OneThatCannotBeFinalizedIsAborted) {
  const auto refused = readyComm();
  nccl->answer("finalize", {NcclResult::kSystemError});
  auto ends = reaper();
  ends->retire({refused}, testDeadline());
  ASSERT_TRUE(refused->awaitGone(testDeadline()));
  EXPECT_EQ(ending(), Calls({"finalize 1", "revoke 1", "groupStart", "abort 1", "groupEnd"}));
  const auto broken = readyComm();
  nccl->answer("asyncError",
               {NcclResult::kInProgress, NcclResult::kRemoteError, NcclResult::kRemoteError});
  ends->retire({broken}, testDeadline());
  ASSERT_TRUE(broken->awaitGone(testDeadline()));
  EXPECT_FALSE(nccl->called("destroy 2"));
  EXPECT_TRUE(nccl->called("abort 2"));
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, AfterAFailureRetiringAbortsAndNeverFinalizes) {
  const auto only = readyComm();
  lifecycle->fail({});
  auto ends = reaper();
  ends->retire({only}, testDeadline());
  EXPECT_TRUE(only->awaitGone(testDeadline()));
  EXPECT_EQ(ending(), Calls({"revoke 1", "groupStart", "abort 1", "groupEnd"}));
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, AnInitThatHangsIsLeftByItsThreadAndAborted) {
  const auto hanging = comm();
  nccl->answer("asyncError", std::deque<NcclResult>(1'000'000, NcclResult::kInProgress));
  bool ready = true;
  std::thread initialising([&] { ready = hanging->initialise({}, testDeadline()); });
  ASSERT_TRUE(waitFor([&] { return nccl->called("asyncError 1"); }));
  auto ends = reaper();
  ends->abort({hanging});
  initialising.join();
  EXPECT_FALSE(ready);
  EXPECT_TRUE(hanging->awaitGone(testDeadline()));
  EXPECT_EQ(ending(), Calls({"groupStart", "abort 1", "groupEnd"}));  // nothing runs: no revoke
  ends->stop(testDeadline());
}

TEST_F(NcclReaper, AnInitThatFailsFailsTheGenerationInNcclsWords) {
  const auto failing = comm("'dp0' on cuda:3");
  nccl->answer("asyncError", {NcclResult::kInProgress, NcclResult::kSystemError});
  EXPECT_FALSE(failing->initialise({}, testDeadline()));
  ASSERT_NE(lifecycle->failure(), nullptr);
  const std::string text = lifecycle->failure()->describe();
  EXPECT_NE(text.find("system error"), std::string::npos) << text;
  EXPECT_NE(text.find("'dp0' on cuda:3"), std::string::npos) << text;
  EXPECT_NE(text.find("scripted"), std::string::npos) << text;
}

TEST_F(NcclReaper, AnInitEndsAtItsDeadline) {
  const auto hanging = comm();
  nccl->answer("asyncError", std::deque<NcclResult>(1'000'000, NcclResult::kInProgress));
  EXPECT_FALSE(hanging->initialise({}, Deadline::after(milliseconds(20))));
  EXPECT_EQ(lifecycle->failure(), nullptr);  // its caller's to say
}

// The root of an id waits for all ranks and hears of no abort.
TEST_F(NcclReaper, TheRootOfAnAbandonedIdIsReleased) {
  const auto hanging = comm();
  hanging->madeRoot({});
  nccl->answer("asyncError", {NcclResult::kInProgress, NcclResult::kSystemError});
  EXPECT_FALSE(hanging->initialise({}, testDeadline()));
  auto ends = reaper();
  ends->abort({hanging});
  EXPECT_TRUE(hanging->awaitGone(testDeadline()));
  EXPECT_TRUE(ends->stop(testDeadline()));
  EXPECT_EQ(ending(), Calls({"groupStart", "abort 1", "groupEnd", "releaseRoot"}));
}

TEST_F(NcclReaper, AnAsynchronousErrorFailsTheGeneration) {
  const auto watched = readyComm();
  nccl->answer("asyncError", {NcclResult::kSystemError});
  watched->lookForError();
  ASSERT_NE(lifecycle->failure(), nullptr);
  EXPECT_EQ(lifecycle->failure()->kind, FailureKind::kInternal);
}

// NCCL says that a peer is gone, and not why: who knows more comes first.
TEST_F(NcclReaper, APeerThatIsGoneIsToldOfOnceNobodyKnowsMore) {
  const auto watched = readyComm();
  nccl->answer("asyncError", std::deque<NcclResult>(1000, NcclResult::kRemoteError));
  watched->lookForError();
  EXPECT_EQ(lifecycle->failure(), nullptr);
  EXPECT_TRUE(waitFor([&] {
    watched->lookForError();
    return lifecycle->failure() != nullptr;
  }));
  EXPECT_EQ(lifecycle->failure()->kind, FailureKind::kConnectionLost);
}

TEST_F(NcclReaper, AGoodbyeIsABetterCauseThanAPeerThatIsGone) {
  const auto watched = readyComm();
  nccl->answer("asyncError", std::deque<NcclResult>(1000, NcclResult::kRemoteError));
  watched->lookForError();
  EXPECT_EQ(lifecycle->failure(), nullptr);
  left->add({1, false});
  watched->lookForError();
  ASSERT_NE(lifecycle->failure(), nullptr);
  EXPECT_EQ(lifecycle->failure()->kind, FailureKind::kPeerLeft);
  EXPECT_EQ(lifecycle->failure()->cause.rank, 1);
}

}  // namespace
}  // namespace torchft_ext
