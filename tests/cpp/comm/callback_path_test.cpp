#include "comm/callback_path.h"

#include <gtest/gtest.h>

#include <set>

namespace torchft_ext {
namespace {

const uint64_t kOne = placeOf("dp0", 3);
const uint64_t kOther = placeOf("tp0", 3);

CallbackPath third() {
  return CallbackPath::ofCollective(kOne, 3, "allreduce", 3);
}

TEST(CallbackPath, EveryWayThroughTheTreeHasANameOfItsOwn) {
  std::set<uint64_t> names;
  int ways = 0;
  for (uint64_t root = 0; root < 20; ++root) {
    const auto operation = CallbackPath::ofCollective(kOne, root, "allreduce", 0);
    for (uint64_t callback = 0; callback < 20; ++callback) {
      for (uint64_t ordinal = 0; ordinal < 20; ++ordinal) {
        const auto nested = operation.callback(callback).collective(kOne, ordinal);
        names.insert(nested.nameIn(kOne));
        names.insert(nested.callback(ordinal).collective(kOne, callback).nameIn(kOne));
        ways += 2;
      }
    }
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(ways));
}

TEST(CallbackPath, IsNotNamedAfterTheGroupThatItStaysIn) {
  const uint64_t renamed = placeOf("another name", 3);
  const auto here = third().callback(0).collective(kOne, 1);
  const auto there =
      CallbackPath::ofCollective(renamed, 3, "", 3).callback(0).collective(renamed, 1);
  EXPECT_EQ(here.nameIn(kOne), there.nameIn(renamed));
}

TEST(CallbackPath, OfAnotherGroupIsNamedAfterBoth) {
  const auto from_one = third().callback(0).collective(kOther, 0);
  const auto from_other =
      CallbackPath::ofCollective(kOther, 3, "", 3).callback(0).collective(kOther, 0);
  EXPECT_NE(from_one.nameIn(kOther), from_other.nameIn(kOther));
  const auto later_generation =
      CallbackPath::ofCollective(placeOf("dp0", 4), 3, "", 3).callback(0).collective(kOther, 0);
  EXPECT_NE(from_one.nameIn(kOther), later_generation.nameIn(kOther));
}

TEST(CallbackPath, ErrorsCallItAfterItsRoot) {
  EXPECT_EQ(inCallbackOf("broadcast", third().callback(0).collective(kOne, 0)),
            "broadcast issued in a callback of allreduce #3");
}

TEST(CallbackScope, CountsByGroupAndTheInnermostCounts) {
  EXPECT_EQ(CallbackScope::present(), nullptr);
  CallbackScope outer(third().callback(0));
  EXPECT_EQ(outer.next(kOther)->nameIn(kOther),
            third().callback(0).collective(kOther, 0).nameIn(kOther));
  {
    const CallbackScope nameless{std::nullopt};
    EXPECT_FALSE(CallbackScope::isNamed());
    EXPECT_EQ(CallbackScope::present()->next(kOne), std::nullopt);
  }
  EXPECT_TRUE(CallbackScope::isNamed());
  EXPECT_EQ(outer.next(kOne)->nameIn(kOne), third().callback(0).collective(kOne, 0).nameIn(kOne));
  EXPECT_EQ(outer.next(kOne)->nameIn(kOne), third().callback(0).collective(kOne, 1).nameIn(kOne));
}

}  // namespace
}  // namespace torchft_ext
