// What holds back a failure that faster members tell of, and what it silences meanwhile.
#include "host/held_failure.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "cpp/support/net_support.h"
#include "cpp/support/wait_for.h"
#include "host/break_classifier.h"
#include "net/event_loop.h"

namespace torchft_ext {
using net_test::onLoop;

namespace {

Failure causedBy(int rank) {
  Failure failure;
  failure.cause.rank = rank;
  return failure;
}

TEST(HeldFailure, IsDueWithTheExchangesOfTheEarliestThatTold) {
  HeldFailure held;
  EXPECT_FALSE(held.holds());
  EXPECT_FALSE(held.isDue(7));
  held.hold(1, 5, causedBy(3));
  held.hold(2, 4, causedBy(4));
  held.hold(0, 6, causedBy(5));
  EXPECT_FALSE(held.isDue(3));
  EXPECT_TRUE(held.isDue(4));
  EXPECT_TRUE(held.isFrom(0) && held.isFrom(1) && held.isFrom(2));
  EXPECT_FALSE(held.isFrom(3));
  EXPECT_EQ(held.take().cause.rank, 4);
  EXPECT_FALSE(held.holds());
}

TEST(HeldFailure, IsStuckOnceOneExchangeHasNeededATellerForAWholeInterval) {
  HeldFailure held;
  held.hold(1, 5, causedBy(3));
  const auto needs = [](int teller) { return teller == 1; };
  const auto needs_none = [](int /*teller*/) { return false; };
  EXPECT_FALSE(held.isStuck(2, needs));
  EXPECT_FALSE(held.isStuck(3, needs));
  EXPECT_FALSE(held.isStuck(3, needs_none));
  EXPECT_FALSE(held.isStuck(3, needs));
  EXPECT_TRUE(held.isStuck(3, needs));
}

TEST(BreakClassifier, GivesNothingOfAMemberThatHasSaidWhy) {
  EventLoop loop("ft-test-loop");
  Roster roster;
  roster.members.resize(3);
  std::atomic<int> given{0};
  std::unique_ptr<BreakClassifier> classifier;
  onLoop(loop, [&] {
    classifier = std::make_unique<BreakClassifier>(
        loop, roster, [&](int rank, FailureKind, const std::string&) { given += 1 << rank; });
    classifier->channelEnded(1, kCollective);
    classifier->channelEnded(2, kCollective);
    classifier->forget(1);
  });
  EXPECT_TRUE(waitFor([&] { return given != 0; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(given, 1 << 2);
  onLoop(loop, [&] { classifier.reset(); });
}

}  // namespace
}  // namespace torchft_ext
