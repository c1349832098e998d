// What is called for each Work that has succeeded.
#include "c10d/work/success_hooks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <utility>

#include "c10d/work/work_key.h"
#include "cpp/support/captured_log.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

class SuccessHooksTest : public ::testing::Test {
 protected:
  using Told = std::vector<std::pair<uint64_t, bool>>;  // key, and whether it has a time

  static std::shared_ptr<OpState> operation() {
    return std::make_shared<OpState>(nullptr, OpKind::kAllreduce, 1, std::chrono::seconds(1));
  }
  static FailurePtr failure() { return std::make_shared<Failure>(); }
  SuccessHooks::Hook teller() {
    return [this](uint64_t key, std::optional<float> milliseconds) {
      told_.emplace_back(key, milliseconds.has_value());
    };
  }

  const std::shared_ptr<SuccessHooks> hooks_ = std::make_shared<SuccessHooks>();
  Told told_;
};

TEST_F(SuccessHooksTest, AreToldOfEachWorkOnceWhenAllOfItHasSucceeded) {
  hooks_->table().add(1, teller());
  const SuccessHooks::States states{operation(), operation()};
  hooks_->watch({7, 8}, states, std::nullopt);
  states[1]->complete(nullptr);
  EXPECT_EQ(told_, Told()) << "a part of it is under way";
  states[0]->complete(nullptr);
  states[0]->complete(nullptr);
  EXPECT_EQ(told_, (Told{{7, true}, {8, true}}));
}

// Its end may need the GIL, whose owner may wait for the table.
TEST_F(SuccessHooksTest, OneThatIsRefusedEndsWithoutTheTablesLock) {
  hooks_->table().add(1, teller());
  std::atomic<bool> passed = false;
  std::thread other;
  bool was_free = false;
  int refused = 0;
  std::shared_ptr<int> end(&refused, [&](int*) {
    other = std::thread([&] {
      hooks_->table().remove(2);
      passed = true;
    });
    was_free = waitFor([&] { return passed.load(); });
  });
  EXPECT_FALSE(hooks_->table().add(
      1, [end = std::move(end)](uint64_t, std::optional<float>) { (void)end; }));
  other.join();
  EXPECT_TRUE(was_free);
}

TEST_F(SuccessHooksTest, AreToldAtOnceOfOneThatIsOverAlready) {
  hooks_->table().add(1, teller());
  const auto done = operation();
  done->complete(nullptr);
  hooks_->watch({7}, {done}, std::nullopt);
  EXPECT_EQ(told_, (Told{{7, true}}));
}

TEST_F(SuccessHooksTest, AreNotToldOfFailures) {
  hooks_->table().add(1, teller());
  const SuccessHooks::States states{operation(), operation()};
  hooks_->watch({7}, states, std::nullopt);
  states[0]->complete(failure());
  states[1]->complete(nullptr);
  EXPECT_EQ(told_, Told());
}

TEST_F(SuccessHooksTest, AreCalledThoughAnotherThrowsAndNotOnceRemoved) {
  const CapturedLog log;
  hooks_->table().add(
      1, [](uint64_t, std::optional<float>) { throw std::runtime_error("of its own"); });
  hooks_->table().add(2, teller());
  EXPECT_FALSE(hooks_->table().add(2, teller())) << "that id is taken";
  for (const uint64_t key : {7, 8}) {
    const auto state = operation();
    hooks_->watch({key}, {state}, std::nullopt);
    if (key == 8) {
      EXPECT_TRUE(hooks_->table().remove(2));
    }
    state->complete(nullptr);
  }
  EXPECT_EQ(told_, (Told{{7, true}}));
  EXPECT_TRUE(CapturedLog::contains("completion hook 1 threw: of its own"));
  EXPECT_FALSE(hooks_->table().remove(2));
}

TEST(WorkKey, IsNeverTheSame) {
  EXPECT_NE(nextWorkKey(), nextWorkKey());
}

}  // namespace
}  // namespace torchft_ext
