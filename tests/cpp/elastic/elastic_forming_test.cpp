// While a view's groups are formed: a member that will not come ends the attempt, and the text says
// why it will not.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "cpp/elastic/elastic_jobs.h"
#include "cpp/support/net_support.h"
#include "elastic/member_driver.h"
#include "elastic/view_check.h"

namespace torchft_ext {
namespace {

using namespace elastic_test;  // NOLINT(google-build-using-namespace)
using namespace net_test;      // NOLINT(google-build-using-namespace)

// Two members, of which the first forms their view.
class ElasticForming : public testing::Test {
 protected:
  ElasticForming() {
    auto joining = std::async(std::launch::async, [this] { return job_.join(2); });
    ElasticOptions options = job_.options(2);
    options.on_stopped = [this](uint64_t, const std::string& why) {
      const MutexLock lock(mutex_);
      told_.push_back(why);
    };
    driver_ = std::make_shared<MemberDriver>(options);
    driver_->start(Deadline::after(kLong), {});
    other_ = joining.get();
    view_ = driver_->status.awaitView(0, Deadline::after(kLong), {});
    onLoop(driver_->loop, [this] { driver_->forming = true; });
  }
  ~ElasticForming() override { driver_->stop(); }
  ElasticForming(const ElasticForming&) = delete;
  ElasticForming& operator=(const ElasticForming&) = delete;

  void hear(ElasticMessage message) {
    message.lineage = view_.lineage;
    onLoop(driver_->loop, [&] { driver_->onElastic(other_->id(), encodeElasticMessage(message)); });
  }
  bool isTold(const std::string& words) {
    return waitFor([&] { return timesTold(words) > 0; });
  }
  std::ptrdiff_t timesTold(const std::string& words) {
    const MutexLock lock(mutex_);
    return std::count_if(told_.begin(), told_.end(),
                         [&](const std::string& why) { return why.ends_with(": " + words); });
  }

  JobOfMembers job_;
  std::shared_ptr<MemberDriver> driver_;
  MemberPtr other_;
  View view_;
  Mutex mutex_;
  std::vector<std::string> told_ GUARDED_BY(mutex_);
};

TEST_F(ElasticForming, IsOverWithAMemberThatTakesPartInAnotherLineage) {
  other_->goOnAlone(Deadline::after(kLong));
  EXPECT_TRUE(isTold("it takes part in another lineage"));
}

// It will not come, and that has been said: a word of it that comes late, or twice, is no news.
TEST_F(ElasticForming, IsNotEndedAgainByAMemberThatWasGoneBefore) {
  ElasticMessage parted;
  parted.kind = ElasticKind::kParted;
  parted.number = 1;
  hear(parted);
  hear(parted);
  onLoop(driver_->loop, [this] { driver_->tellStopped(1, "test: the last word"); });
  ASSERT_TRUE(isTold("the last word"));
  EXPECT_EQ(timesTold("it takes part in another lineage"), 1);
}

// It tells the view that is without it, and does not know the secret of that one.
TEST_F(ElasticForming, IsOverWithAMemberThatIsLeftOut) {
  const MemberId self = driver_->status.self().id;
  View next = view_;
  next.number = 2;
  std::erase_if(next.members, [&](const Member& member) { return member.id != self; });
  next.voters = next.decided_by = {self};
  next.old_size = 2;
  setSecret(next, ViewSecret::random());
  next.seal = sealOf(next, view_.secret);
  next.secret = {};
  ElasticMessage told;
  told.kind = ElasticKind::kView;
  told.number = 2;
  told.view = next;
  hear(told);
  EXPECT_TRUE(isTold("it has been left out"));
}

// It came with the view, so what it tells of a later one is not believed; but it will not come.
TEST_F(ElasticForming, IsOverWithAMemberThatTellsOfALaterView) {
  ElasticMessage told;
  told.kind = ElasticKind::kView;
  told.number = 2;
  told.view = view_;
  told.view->number = 2;
  told.view->members = {view_.members[1]};
  told.view->voters = told.view->decided_by = {other_->id()};
  told.view->old_size = 2;
  told.view->outcomes.clear();
  told.view->seal = {};
  hear(told);
  EXPECT_TRUE(isTold("it tells of a later view"));
  job_.store->fail("gone");  // with which this one would go on alone
  onLoop(driver_->loop, [this] { driver_->carryOut(driver_->core->want(1)); });
  try {
    driver_->status.awaitView(1, Deadline::after(std::chrono::milliseconds(300)), {});
    FAIL() << "expected no quorum";
  } catch (const ElasticError& error) {
    EXPECT_EQ(error.kind(), ElasticErrorKind::kNoQuorum);
    EXPECT_EQ(countOf("join again", error), 1U) << error.what();
  }
}

// By the store's rule: what it has written last may still be on its way to the store.
TEST_F(ElasticForming, IsNotHopelessByWhatTheStoreSaidBeforeADeath) {
  onLoop(driver_->loop, [this] {
    driver_->stays_undecided = true;
    driver_->onLost(other_->id(), Loss::kDead, "it ended");
    EXPECT_FALSE(driver_->stays_undecided);
  });
}

TEST_F(ElasticForming, IsOverWithAMemberThatLeaves) {
  onLoop(driver_->loop, [this] { driver_->events().on_goodbye(other_->id()); });
  other_.reset();
  EXPECT_TRUE(isTold("it has left"));
}

TEST_F(ElasticForming, IsOverWithAMemberWhoseProcessEnds) {
  other_.reset();
  EXPECT_TRUE(isTold("its process ended"));
}

}  // namespace
}  // namespace torchft_ext
