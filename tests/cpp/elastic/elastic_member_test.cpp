// Whole members of an elastic job: they found it, agree, share a store, and leave.
#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/elastic/elastic_jobs.h"
#include "cpp/support/captured_log.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

using namespace elastic_test;  // NOLINT(google-build-using-namespace)

TEST(ElasticMember, AJobIsFoundedByAsManyAsWereAskedFor) {
  JobOfMembers job;
  job.found(3);
  expectOneView(job.awaitViews(0), 1, 3);
}

TEST(ElasticMember, AllAgreeOrNobody) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  for (const Answer& answer : job.agree(1, {true, true, true})) {
    EXPECT_TRUE(answer.ok);
    EXPECT_EQ(answer.notes.size(), 3U);
  }
  for (const Answer& answer : job.agree(1, {true, false, true})) EXPECT_FALSE(answer.ok);
  for (const Answer& answer : job.agree(1, {true, true, true})) EXPECT_TRUE(answer.ok);
}

TEST(ElasticMember, AllLearnThatADigestDiffers) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  const std::vector<bool> all(3, true);
  for (const Answer& answer : job.agree(1, all, {{"a"}, {"b"}, {"a"}})) {
    EXPECT_FALSE(answer.ok);
    EXPECT_TRUE(answer.diverged);
  }
  for (const Answer& answer : job.agree(1, all, {{"a"}, {"a"}, {"a"}})) {
    EXPECT_TRUE(answer.ok);
    EXPECT_FALSE(answer.diverged);
  }
}

TEST(ElasticMember, TheLogNamesThoseThatHaveNotVotedAfterATenthOfTheTime) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  const CapturedLog log;
  Vote yes;
  yes.ok = true;
  auto waiting = std::async(std::launch::async, [&] {
    return job.members[0]->agree(1, yes, Deadline::after(std::chrono::seconds(11)));
  });
  EXPECT_TRUE(
      waitFor([&] { return CapturedLog::contains("agreement 1 of view 1 still waits for "); }));
  job.members[1]->agree(1, yes, Deadline::after(kLong));
  EXPECT_TRUE(waiting.get().ok);
}

TEST(ElasticMember, ADigestThatIsTooLongIsRefused) {
  JobOfMembers job;
  job.found(1);
  job.awaitViews(0);
  Vote vote;
  vote.digest.of_shard = std::string(kLongestDigest + 1, 'a');
  EXPECT_THROW(job.members[0]->agree(1, vote, Deadline::after(kLong)), std::invalid_argument);
}

TEST(ElasticMember, ASecondThreadInAgreeIsToldSoAtOnce) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  const auto agree = [&](size_t i) {
    Vote vote;
    vote.ok = true;
    try {
      return std::string(job.members[i]->agree(1, vote, Deadline::after(kLong)).ok ? "ok" : "no");
    } catch (const ElasticError& error) {
      return std::string(error.what());
    }
  };
  std::vector<std::future<std::string>> threads;
  for (int i = 0; i < 2; ++i) threads.push_back(std::async(std::launch::async, agree, 0));
  const auto isThere = [](const std::future<std::string>& one) {
    return one.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  while (!isThere(threads[0]) && !isThere(threads[1])) std::this_thread::yield();
  if (!isThere(threads[0])) std::swap(threads[0], threads[1]);
  const std::string told = threads[0].get();
  EXPECT_NE(told.find("another thread"), std::string::npos) << told;
  EXPECT_EQ(agree(1), "ok");
  EXPECT_EQ(threads[1].get(), "ok");
}

TEST(ElasticMember, LeavesAtABoundary) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  job.members[2]->setLeaving();
  const std::vector<Answer> answers = job.agree(1, {true, true, true});
  ASSERT_EQ(answers[0].leaving.size(), 1U);
  EXPECT_EQ(answers[0].leaving[0], job.members[2]->id());
  const auto leaver = job.members[2];
  job.members.pop_back();
  expectOneView(job.awaitViews(1), 2, 2);
  EXPECT_TRUE(leaver->leave(Deadline::after(kLong)));
}

// The others have put it into a view before they heard that it goes.
TEST(ElasticMember, WhoLeavesGetsNoViewThatWasDecidedOnBefore) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  const auto leaver = job.members[1];
  EXPECT_TRUE(job.members[0]->awaitView(1, Deadline::after(kLong)).has(leaver->id()));
  leaver->setLeaving();
  const ElasticError error = whyNoView(leaver, 1);
  EXPECT_EQ(error.kind(), ElasticErrorKind::kLeftOut);
  EXPECT_EQ(countOf("has said that it leaves", error), 1U) << error.what();
  expectOneView({job.members[0]->awaitView(2, Deadline::after(kLong))}, 3, 1);
}

// Whoever returned from the last agreement first may go at once; the others get their answer.
TEST(ElasticMember, NobodyIsLeftInTheLastAgreement) {
  for (int round = 0; round < 30; ++round) {
    JobOfMembers job;
    job.found(3);
    job.awaitViews(0);
    std::vector<std::future<bool>> working;
    for (const auto& member : job.members) {
      working.push_back(std::async(std::launch::async, [member] {
        bool good = true;
        for (int step = 0; step < 5; ++step) {
          Vote vote;
          vote.ok = true;
          good = member->agree(1, vote, Deadline::after(kLong)).ok && good;
        }
        return member->leave(Deadline::after(kLong)) && good;
      }));
    }
    for (auto& one : working) EXPECT_TRUE(one.get());
  }
}

TEST(ElasticMember, TheViewsStoreAnswersAllItsMembers) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  auto waiting = std::async(std::launch::async, [&] {
    StoreCall get;
    get.view = 1;
    get.keys = {"a", "b"};
    get.wait = true;
    return job.members[2]->callStore(get, Deadline::after(kLong));
  });
  for (const std::string key : {"a", "b"}) {
    StoreCall set;
    set.what = StoreCall::What::kSet;
    set.view = 1;
    set.keys = {key};
    set.value = "value of " + key;
    job.members[key == "a" ? 0 : 1]->callStore(set, Deadline::after(kLong));
  }
  const StoreAnswer found = waiting.get();
  ASSERT_EQ(found.values.size(), 2U);
  EXPECT_EQ(found.values[1], "value of b");
}

// Members who cannot decide on the next view do not wait in the last one meanwhile.
TEST(ElasticMember, TheStoreOfAViewThatIsOverAnswersNobodyThoughNoOtherIsDecided) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.store->fail("gone");
  const auto member = job.members.front();
  auto waiting = std::async(std::launch::async, [&] {
    StoreCall get;
    get.view = 1;
    get.keys = {"never set"};
    get.wait = true;
    return member->callStore(get, Deadline::after(kLong));
  });
  job.members.pop_back();
  EXPECT_THROW(member->awaitView(1, Deadline::after(std::chrono::seconds(1))), ElasticError);
  const Deadline promptly = Deadline::after(kLong / 2);
  EXPECT_THROW(waiting.get(), StoreError);
  EXPECT_FALSE(promptly.expired());
}

}  // namespace
}  // namespace torchft_ext
