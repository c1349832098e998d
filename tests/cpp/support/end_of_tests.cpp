// The test program ends its callback threads before it exits. Otherwise a thread that has just
// become spare may have ended, and not been joined yet, which ThreadSanitizer reports as a leak.
#include <gtest/gtest.h>

#include "base/deadline.h"
#include "comm/callbacks.h"

namespace torchft_ext {
namespace {

class CallbackThreadsEnd : public testing::Environment {
  void TearDown() override {
    EXPECT_TRUE(stopCallbackThreads(Deadline::after(std::chrono::seconds(20))));
  }
};

[[maybe_unused]] const testing::Environment* const kEnd =
    testing::AddGlobalTestEnvironment(new CallbackThreadsEnd);

}  // namespace
}  // namespace torchft_ext
