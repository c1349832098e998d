// What registering memory calls in NCCL, against a scripted one: order, refusals, calls that do not
// return.
#include <gtest/gtest.h>

#include "base/threads.h"
#include "cpp/comm/throwing_hook.h"
#include "cpp/nccl/scripted_nccl.h"
#include "cpp/support/wait_for.h"
#include "nccl/comm_reaper.h"
#include "nccl/memory_registry.h"
#include "sim.h"

namespace torchft_ext {
namespace {

using Calls = std::vector<std::string>;
using Kind = MemoryOutcome::Kind;

constexpr PoolId kPool{0, 1};

class NcclMemoryCalls : public testing::Test {
 protected:
  std::shared_ptr<DeviceComm> readyComm() {
    auto platform = std::make_shared<NcclPlatform>(*sim::platform());
    platform->nccl = nccl;
    auto made = std::make_shared<DeviceComm>(DeviceCommSetup{
        platform, lifecycle, c10::Device(c10::DeviceType::PrivateUse1, 0), 0, 2, "c", false});
    EXPECT_TRUE(made->initialise({}, testDeadline()));
    return made;
  }
  // Segments at address and of that many bytes.
  MemoryPool pool(const std::vector<size_t>& segments) {
    MemoryPool made{kPool, std::make_shared<int>(0), {}};
    for (const size_t size : segments) made.segments.push_back({kPool, 0, size, size});
    owner = made.owner;
    return made;
  }
  Calls memoryCalls() const {
    return nccl->callsBut({"init", "asyncError", "getUniqueId", "groupStart", "groupEnd"});
  }
  void end(const std::shared_ptr<DeviceComm>& comm) {
    CommReaper reaper([] {}, kTestPatience);
    reaper.abort({comm});
    EXPECT_TRUE(comm->awaitGone(testDeadline()));
    reaper.stop(testDeadline());
  }
  void TearDown() override { nccl->unblock(); }

  std::shared_ptr<ScriptedNccl> nccl = std::make_shared<ScriptedNccl>();
  std::shared_ptr<Lifecycle> lifecycle =
      std::make_shared<Lifecycle>(GenerationIdentity{"scripted", 1, 0, 2});
  MemoryRegistry registry;
  std::weak_ptr<void> owner;
};

TEST_F(NcclMemoryCalls, AHealthyEndDeregistersBeforeItFinalizes) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  EXPECT_EQ(registry.add(pool({16, 32}), testDeadline()).kind, Kind::kDone);
  CommReaper reaper([] {}, kTestPatience);
  reaper.retire({comm}, testDeadline());
  ASSERT_TRUE(comm->awaitGone(testDeadline()));
  EXPECT_EQ(memoryCalls(),
            Calls({"registerBuffer 1 16", "registerBuffer 1 32", "deregisterBuffer 1 16",
                   "deregisterBuffer 1 32", "finalize 1", "destroy 1"}));
  reaper.stop(testDeadline());
}

TEST_F(NcclMemoryCalls, AHealthyEndWhoseMemoryIsNotGivenBackIsAnAbort) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  registry.add(pool({16}), testDeadline());
  nccl->answer("deregisterBuffer", {NcclResult::kSystemError});
  CommReaper reaper([] {}, kTestPatience);
  reaper.retire({comm}, testDeadline());
  ASSERT_TRUE(comm->awaitGone(testDeadline()));
  EXPECT_FALSE(nccl->called("finalize 1"));
  EXPECT_TRUE(nccl->called("abort 1"));
  reaper.stop(testDeadline());
}

TEST_F(NcclMemoryCalls, ARefusedSegmentTakesBackThoseBeforeIt) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  nccl->answer("registerBuffer", {NcclResult::kSuccess, NcclResult::kInvalidUsage});
  const MemoryOutcome outcome = registry.add(pool({16, 32, 48}), testDeadline());
  EXPECT_EQ(outcome.kind, Kind::kRefused);
  EXPECT_NE(outcome.why.find("32 bytes at 0x20 of pool (0, 1)"), std::string::npos) << outcome.why;
  EXPECT_EQ(memoryCalls(),
            Calls({"registerBuffer 1 16", "registerBuffer 1 32", "deregisterBuffer 1 16"}));
  EXPECT_FALSE(registry.knows(kPool));
  EXPECT_FALSE(comm->memory().holdsAny());
  EXPECT_FALSE(lifecycle->over());
  EXPECT_TRUE(waitFor([&] { return owner.expired(); }));
  end(comm);
}

TEST_F(NcclMemoryCalls, ARefusalInANewCommunicatorTakesBackAtOnceAndFailsTheGeneration) {
  EXPECT_EQ(registry.add(pool({16, 32}), testDeadline()).kind, Kind::kDone);
  const auto comm = readyComm();
  nccl->answer("registerBuffer", {NcclResult::kSuccess, NcclResult::kInvalidUsage});
  EXPECT_FALSE(registry.attach(comm, testDeadline()));
  EXPECT_EQ(memoryCalls(),
            Calls({"registerBuffer 1 16", "registerBuffer 1 32", "deregisterBuffer 1 16"}));
  EXPECT_NE(lifecycle->failure(), nullptr);
  EXPECT_TRUE(registry.knows(kPool));
  end(comm);
}

TEST_F(NcclMemoryCalls, ARefusalOfOneCommunicatorTakesItBackFromTheOthers) {
  const auto first = readyComm();
  const auto second = readyComm();
  for (const auto& comm : {first, second}) ASSERT_TRUE(registry.attach(comm, testDeadline()));
  EXPECT_EQ(registry.add(pool({16}), testDeadline()).kind, Kind::kDone);
  nccl->answer("registerBuffer", {NcclResult::kSuccess, NcclResult::kInvalidUsage});
  EXPECT_EQ(registry.add(pool({16, 32}), testDeadline()).kind, Kind::kRefused);
  EXPECT_EQ(memoryCalls(),
            Calls({"registerBuffer 1 16", "registerBuffer 2 16", "registerBuffer 1 32",
                   "registerBuffer 2 32", "deregisterBuffer 1 32"}));
  EXPECT_TRUE(registry.knows(kPool));
  end(first);
  end(second);
}

TEST_F(NcclMemoryCalls, ASuccessWithoutAHandleIsKeptAndNothingIsDeregistered) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  nccl->without_handles = true;
  EXPECT_EQ(registry.add(pool({16}), testDeadline()).kind, Kind::kDone);
  EXPECT_EQ(registry.add(pool({16}), testDeadline()).kind, Kind::kDone);
  EXPECT_EQ(memoryCalls(), Calls({"registerBuffer 1 16"}));
  EXPECT_EQ(registry.remove(kPool, testDeadline()).kind, Kind::kDone);
  EXPECT_EQ(memoryCalls(), Calls({"registerBuffer 1 16"}));
  end(comm);
}

TEST_F(NcclMemoryCalls, NothingIsCalledWhileNcclIsAtWork) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  const size_t asked = nccl->calls().size();
  nccl->answer("asyncError", {NcclResult::kInProgress, NcclResult::kInProgress});
  EXPECT_EQ(registry.add(pool({16}), testDeadline()).kind, Kind::kDone);
  const Calls all = nccl->calls();
  EXPECT_EQ(Calls(all.begin() + static_cast<long>(asked), all.end()),
            Calls({"asyncError 1", "asyncError 1", "asyncError 1", "registerBuffer 1 16"}));
  end(comm);
}

TEST_F(NcclMemoryCalls, WhereNcclIsAtWorkBeyondTheDeadlineNothingIsKept) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  nccl->answer("asyncError", std::deque<NcclResult>(100000, NcclResult::kInProgress));
  EXPECT_EQ(registry.add(pool({16}), Deadline::after(milliseconds(20))).kind, Kind::kLate);
  EXPECT_FALSE(registry.knows(kPool));
  EXPECT_TRUE(owner.expired());
  nccl->answer("asyncError", {});
  end(comm);
}

TEST_F(NcclMemoryCalls, ASignalWhileItWaitsTakesBackWhatWasRegistered) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  {
    const GateEntry busy(comm->gate(), testDeadline());
    const ThrowingHook signal;
    EXPECT_THROW(registry.add(pool({16}), testDeadline()), Interrupted);
  }
  EXPECT_FALSE(registry.knows(kPool));
  EXPECT_EQ(memoryCalls(), Calls());
  EXPECT_EQ(registry.add(pool({16}), testDeadline()).kind, Kind::kDone);
  end(comm);
}

// As where it asks a peer's proxy, and that peer is frozen.
TEST_F(NcclMemoryCalls, ADeregistrationThatDoesNotReturnIsAbandonedAndKeepsTheMemory) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  registry.add(pool({16}), testDeadline());
  const int before = threadSnapshot().stuck;
  nccl->block("deregisterBuffer");
  EXPECT_EQ(registry.remove(kPool, Deadline::after(milliseconds(50))).kind, Kind::kLate);
  EXPECT_EQ(threadSnapshot().stuck, before + 1);
  ASSERT_NE(lifecycle->failure(), nullptr);
  EXPECT_EQ(lifecycle->failure()->kind, FailureKind::kTimeout);
  EXPECT_FALSE(owner.expired());
  EXPECT_FALSE(registry.knows(kPool));
  EXPECT_EQ(registry.notFreed().size(), 1);
  nccl->unblock();
  EXPECT_TRUE(waitFor([&] { return owner.expired() && threadSnapshot().stuck == before; }));
  end(comm);
}

TEST_F(NcclMemoryCalls, ARefusedDeregistrationKeepsTheMemoryToTheCommunicatorsEnd) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  registry.add(pool({16}), testDeadline());
  nccl->answer("deregisterBuffer", {NcclResult::kSystemError});
  EXPECT_EQ(registry.remove(kPool, testDeadline()).kind, Kind::kRefused);
  EXPECT_FALSE(lifecycle->over());
  EXPECT_FALSE(owner.expired());
  end(comm);
  EXPECT_TRUE(waitFor([&] { return owner.expired(); }));
}

TEST_F(NcclMemoryCalls, MemoryOfACommunicatorThatIsNeverFreedIsKeptForGood) {
  {
    const auto comm = readyComm();
    ASSERT_TRUE(registry.attach(comm, testDeadline()));
    registry.add(pool({16}), testDeadline());
    registry.close();
  }
  EXPECT_FALSE(owner.expired());
}

TEST_F(NcclMemoryCalls, AGenerationThatIsOverIsAskedNothing) {
  const auto comm = readyComm();
  ASSERT_TRUE(registry.attach(comm, testDeadline()));
  registry.add(pool({16}), testDeadline());
  lifecycle->fail(lifecycle->ownFailure(FailureKind::kAborted, "a test said so"));
  const std::weak_ptr<void> first = owner;
  EXPECT_EQ(registry.add(pool({32}), testDeadline()).kind, Kind::kDone);
  EXPECT_EQ(registry.remove(kPool, testDeadline()).kind, Kind::kDone);
  EXPECT_EQ(memoryCalls(), Calls({"registerBuffer 1 16"}));
  EXPECT_FALSE(first.expired());
  end(comm);
}

}  // namespace
}  // namespace torchft_ext
