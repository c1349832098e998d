// What a kernel that is stopped leaves behind: junk that other ranks' kernels take for data, and
// its own last writes. No operation succeeds with the former, nothing of the caller's is
// overwritten by the latter. Over the NCCL engine and the simulator, which does both.
#include <gtest/gtest.h>

#include "cpp/nccl/nccl_cluster.h"
#include "sim_stream.h"

namespace torchft_ext {
namespace {

using Values = std::vector<float>;

constexpr Duration kHeldUp = milliseconds(50);
constexpr Duration kHeldUpShortly = milliseconds(10);  // a tenth of what is given to telling
constexpr int kLinger = 200;                           // milliseconds

class NcclUpdatesTest : public NcclTest {
 protected:
  static void sumOnAll(Cluster& cluster) {
    cluster.onAll([&](int i) {
      const Floats values = floats(i, Values(10, 1));
      EXPECT_EQ(finish(cluster.group(i).issue(deviceAllreduce(values))), nullptr);
    });
  }
  // An all-reduce on both, in which rank 0's kernel stays until it is stopped.
  std::vector<std::shared_ptr<OpState>> stuckOnBoth(Cluster& cluster) {
    inject("hang allreduce rank=0");
    std::vector<std::shared_ptr<OpState>> states(2);
    cluster.onAll([&](int i) {
      states[static_cast<size_t>(i)] =
          cluster.group(i).issue(deviceAllreduce(floats(i, Values(10, 1))));
    });
    return states;
  }
};

void expectAborted(const std::shared_ptr<OpState>& state) {
  const FailurePtr failure = finish(state);
  ASSERT_NE(failure, nullptr) << "a sum with junk in it counts as a success";
  EXPECT_EQ(failure->kind, FailureKind::kAborted);
}

TEST_F(NcclUpdatesTest, WhoeverHearsLateDoesNotTakeJunkForAResult) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "late");
  sumOnAll(cluster);
  const auto states = stuckOnBoth(cluster);
  holdUpForTest(*cluster.members[1]->engine, kHeldUp);
  cluster.group(0).abort("the test says so");
  expectAborted(states[1]);
  expectAborted(states[0]);
}

TEST_F(NcclUpdatesTest, WhoeverTellsLateStopsNoKernelBefore) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "slow");
  sumOnAll(cluster);
  const auto states = stuckOnBoth(cluster);
  holdUpForTest(*cluster.members[0]->engine, kHeldUpShortly);
  cluster.group(0).abort("the test says so");
  expectAborted(states[1]);
  expectAborted(states[0]);
}

TEST_F(NcclUpdatesTest, AMemberThatLeavesInTheMiddleLetsNobodyTakeJunkForAResult) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "leaves");
  sumOnAll(cluster);
  const auto states = stuckOnBoth(cluster);
  holdUpForTest(*cluster.members[1]->engine, kHeldUp);
  EXPECT_FALSE(cluster.group(0).shutdown(Deadline::after(milliseconds(10))));
  expectAborted(states[1]);
  expectAborted(states[0]);
}

TEST_F(NcclUpdatesTest, AGroupThatIsDroppedInTheMiddleTellsFirst) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "dropped");
  sumOnAll(cluster);
  const auto states = stuckOnBoth(cluster);
  holdUpForTest(*cluster.members[0]->engine, kHeldUpShortly);
  cluster.members[0]->group.reset();
  expectAborted(states[1]);
  expectAborted(states[0]);
}

// What a caller's thread enqueues once it knows of the failure comes behind the kernel's last
// write.
class NcclLastWriteTest : public NcclUpdatesTest {
 protected:
  void SetUp() override {
    NcclUpdatesTest::SetUp();
    cluster.form(cluster.all(), "last");
    sumOnAll(cluster);
    inject("hang allreduce rank=0 ms=" + std::to_string(kLinger));
    state = cluster.group(0).issue(deviceAllreduce(values));
  }
  void expectKept() const {
    const c10::Stream current = currentOn(values->device());
    sim::streamOf(current).enqueue([data = values->data()] { std::fill_n(data, 10, 7.0F); });
    sim::streamOf(current).synchronize();
    const auto drained = [] { return sharedNcclThreads()->poller->counts().draining == 0; };
    EXPECT_TRUE(waitFor(drained));  // its last write is behind it then
    EXPECT_EQ(values->read(), Values(10, 7));
  }

  NcclCluster cluster{2};
  const Floats values = floats(0, Values(10, 1));
  std::shared_ptr<OpState> state;
};

TEST_F(NcclLastWriteTest, ComesBeforeWhatFollowsAnAbort) {
  cluster.group(0).abort("the test says so");
  expectKept();
}

TEST_F(NcclLastWriteTest, ComesBeforeWhatFollowsAFailedCheck) {
  cluster.group(1).abort("the test says so");
  EXPECT_NE(cluster.group(0).check(testDeadline()), nullptr);
  expectKept();
}

TEST_F(NcclLastWriteTest, ComesBeforeWhatFollowsConfigure) {
  cluster.form({0}, "next");
  expectKept();
}

}  // namespace
}  // namespace torchft_ext
