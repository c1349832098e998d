#include "c10d/group/ephemeral_timeouts.h"

#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

using std::chrono::seconds;

std::shared_ptr<OpState> pending() {
  const GenerationIdentity identity{"dp0", 1, 0, 1};
  return std::make_shared<OpState>(std::make_shared<Lifecycle>(identity), OpKind::kBarrier, 1,
                                   seconds(5));
}

TEST(EphemeralTimeouts, LastUntilTheFirstOperationSinceIsComplete) {
  EphemeralTimeouts times;
  times.issued(pending());  // before it
  times.add(seconds(3));
  const auto first = pending();
  times.issued(first);
  times.issued(pending());
  EXPECT_EQ(times.onTopOf(seconds(5)), seconds(8));
  first->complete(nullptr);
  EXPECT_EQ(times.onTopOf(seconds(5)), seconds(5));
}

TEST(EphemeralTimeouts, AddUpAndEndEachByItself) {
  EphemeralTimeouts times;
  times.add(seconds(3));
  const auto first = pending();
  times.issued(first);
  times.add(seconds(10));
  EXPECT_EQ(times.onTopOf(seconds(5)), seconds(18));
  first->complete(nullptr);
  EXPECT_EQ(times.onTopOf(seconds(5)), seconds(15));
}

TEST(EphemeralTimeouts, KeepOverlongLimitsOverlong) {
  EphemeralTimeouts times;
  times.add(seconds(3));
  EXPECT_EQ(times.onTopOf(Duration::max()), Duration::max());
  times.add(Duration::max());
  EXPECT_EQ(times.onTopOf(seconds(5)), Duration::max());
}

}  // namespace
}  // namespace torchft_ext
