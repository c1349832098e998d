#include "base/sole_copy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "cpp/support/processes.h"

namespace torchft_ext {
namespace {

TEST(SoleCopy, TheOnlyOneTakesTheProcessAsOftenAsItIsAsked) {
  requireSoleCopy();
  requireSoleCopy();
}

TEST(SoleCopy, ASecondOneInAProcessIsRefusedWithTheFirstOnesName) {
  const std::string copy = ::testing::TempDir() + "core_copy_" + std::to_string(::getpid()) + ".so";
  std::filesystem::copy_file(TFT_CORE_LIBRARY, copy);
  Processes program;
  program.start({TFT_TWO_COPIES, TFT_CORE_LIBRARY, copy});
  EXPECT_TRUE(program.endWell(Deadline::after(std::chrono::seconds(60))));
  std::filesystem::remove(copy);
}

}  // namespace
}  // namespace torchft_ext
