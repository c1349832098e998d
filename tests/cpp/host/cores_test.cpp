// What the kernel says that a process may use.
#include "host/cores.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace torchft_ext {
namespace {

namespace fs = std::filesystem;

class Cores : public testing::Test {
 protected:
  Cores() { fs::create_directories(root_ + "/job/worker"); }
  ~Cores() override { fs::remove_all(root_); }

  void limit(const std::string& group, const std::string& cpu_max) const {
    std::ofstream(root_ + group + "/cpu.max") << cpu_max << "\n";
  }

  const std::string root_ =
      testing::TempDir() + "cores_" + testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(Cores, ThereIsNoLimitWithoutAQuota) {
  EXPECT_EQ(coresOfCgroups("0::/job/worker\n", root_), 0);
  limit("/job", "max 100000");
  EXPECT_EQ(coresOfCgroups("0::/job/worker\n", root_), 0);
  EXPECT_EQ(coresOfCgroups("4:cpu:/job\n", root_), 0);
  EXPECT_EQ(coresOfCgroups("", root_), 0);
}

TEST_F(Cores, TheSmallestQuotaAboveCountsInWholeCores) {
  limit("/job/worker", "800000 100000");
  limit("/job", "350000 100000");
  EXPECT_EQ(coresOfCgroups("1:name=systemd:/x\n0::/job/worker\n", root_), 3);
  limit("/job", "50000 100000");
  EXPECT_EQ(coresOfCgroups("0::/job/worker\n", root_), 1);
}

// A container sees its own cgroup as the root of the mount, and perhaps a path of the host's.
TEST_F(Cores, APathThatIsNotThereLeavesTheRoot) {
  limit("", "200000 100000");
  EXPECT_EQ(coresOfCgroups("0::/docker/4f1c\n", root_), 2);
}

TEST(UsableCores, AreOneAtLeast) {
  EXPECT_GE(usableCores(), 1);
}

}  // namespace
}  // namespace torchft_ext
