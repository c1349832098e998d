// Whole members of an elastic job: newcomers and spares, and those that take them in.
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>
#include <vector>

#include "cpp/elastic/elastic_jobs.h"

namespace torchft_ext {
namespace {

using namespace elastic_test;  // NOLINT(google-build-using-namespace)

TEST(ElasticMember, WhoTookInThreeThatEndBeforeACommitGoesOnAlone) {
  JobOfMembers job;
  job.found(1);
  job.awaitViews(0);
  const auto first = job.members.front();
  std::vector<std::future<View>> places;
  for (int i = 0; i < 3; ++i) {
    job.members.push_back(job.join(1));
    places.push_back(awaitView(job.members.back(), 0));
  }
  while (first->waiting().size() < 3) std::this_thread::sleep_for(milliseconds(1));
  std::vector<View> views{first->awaitView(1, Deadline::after(kLong))};
  for (auto& place : places) views.push_back(place.get());
  expectOneView(views, 2, 4);
  EXPECT_EQ(views.front().voters.size(), 1U);
  job.members.resize(1);
  expectOneView(job.awaitViews(2), 3, 1);
}

TEST(ElasticMember, ANewcomerIsTakenInAtOneBoundary) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  auto newcomer = job.join(2);
  auto place = awaitView(newcomer, 0);
  ASSERT_TRUE(job.agreeUntil(1, [](const Answer& answer) { return !answer.waiting.empty(); }));
  std::vector<View> views = job.awaitViews(1);
  views.push_back(place.get());
  expectOneView(views, 2, 3);
  EXPECT_EQ(views[0].voters.size(), 2U);
  job.members.push_back(newcomer);
  for (const Answer& answer : job.agree(2, {true, true, true})) EXPECT_TRUE(answer.ok);
}

TEST(ElasticMember, ASpareIsNothingToDoFor) {
  JobOfMembers job;
  job.found(2, 2);
  job.awaitViews(0);
  const auto spare = job.join(2);
  auto place = awaitView(spare, 0);
  const Deadline deadline = Deadline::after(kLong);
  while (job.members[0]->waiting().empty() && !deadline.expired()) job.agree(1, {true, true});
  ASSERT_EQ(job.members[0]->waiting().size(), 1U);
  EXPECT_TRUE(job.agree(1, {true, true})[0].waiting.empty());
  job.members.pop_back();  // there is room now
  const View view = job.awaitViews(1)[0];
  EXPECT_EQ(view.members.size(), 2U);
  EXPECT_EQ(place.get(), view);
}

// They end at once: nobody else could tell it.
TEST(ElasticMember, ANewcomerIsHandedTheJobByMembersThatAllGo) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  const MemberPtr newcomer = job.join(2);
  auto place = awaitView(newcomer, 0);
  ASSERT_TRUE(job.agreeUntil(1, [](const Answer& answer) { return !answer.waiting.empty(); }));
  for (const MemberPtr& member : job.members) member->setLeaving();
  for (const MemberPtr& member : job.members) awaitThreadOf(member, 1);
  std::vector<std::future<void>> going;
  for (const MemberPtr& member : job.members) {
    going.push_back(std::async(std::launch::async, [member] {
      EXPECT_THROW(member->awaitView(1, Deadline::after(kLong)), ElasticError);
      EXPECT_TRUE(member->leave(Deadline::after(kLong)));
    }));
  }
  for (auto& one : going) one.get();
  job.members = {newcomer};
  expectOneView({place.get()}, 2, 1);
  EXPECT_TRUE(job.agree(2, {true})[0].ok);
}

// A newcomer of another host; one member alone knows that it could not connect to it.
TEST(ElasticMember, AHostThatCouldNotBeConnectedToIsTakenInLaterUnderWhateverId) {
  static constexpr std::chrono::seconds kBackoff{2};
  JobOfMembers job;
  const auto joinFrom = [&job](const std::string& ip) {
    ElasticOptions options = job.options(2);
    options.bind_address = *SocketAddress::fromNumeric(ip, 0);
    options.backoff = kBackoff;
    return std::async(std::launch::async,
                      [options] { return ElasticMember::join(options, Deadline::after(kLong)); });
  };
  std::vector<std::future<MemberPtr>> founding;
  for (int i = 0; i < 2; ++i) founding.push_back(joinFrom("127.0.0.1"));
  for (auto& one : founding) job.members.push_back(one.get());
  job.awaitViews(0);
  const auto somebodyWaits = [](const Answer& answer) { return !answer.waiting.empty(); };
  MemberPtr other = joinFrom("127.0.0.2").get();
  auto place = awaitView(other, 0);
  ASSERT_TRUE(job.agreeUntil(1, somebodyWaits));
  job.awaitViews(1);
  ASSERT_EQ(place.get().members.size(), 3U);

  const auto failed_at = Clock::now();
  auto second = awaitView(job.members[1], 2);
  const MemberPair cut = std::minmax(job.members[0]->id(), other->id());
  const View without = job.members[0]->awaitView(2, Deadline::after(kLong), {}, {cut});
  expectOneView({without, second.get()}, 3, 2);
  other = joinFrom("127.0.0.2").get();
  place = awaitView(other, 0);
  ASSERT_TRUE(job.agreeUntil(3, somebodyWaits));
  EXPECT_GE(Clock::now() - failed_at, kBackoff);
  job.awaitViews(3);
  EXPECT_EQ(place.get().members.size(), 3U);
}

TEST(ElasticMember, ANewcomerIsToldThatTheJobHasEnded) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.members.clear();
  const auto newcomer = job.join(2);
  const ElasticError error = whyNoView(newcomer, 0);
  EXPECT_EQ(countOf("another name", error), 1U) << error.what();
  EXPECT_EQ(countOf("(its process ended)", error), 2U) << error.what();
}

TEST(ElasticMember, AStoreThatRestartedEmptyStillHasTheJob) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  job.store->clear();
  while (!job.store->peek("job/founding")) std::this_thread::yield();
  std::vector<MemberPtr> late;
  for (int i = 0; i < 3; ++i) late.push_back(job.join(3));  // as many as would found one
  std::vector<std::future<View>> places;
  for (const auto& one : late) places.push_back(awaitView(one, 0));
  ASSERT_TRUE(job.agreeUntil(1, [](const Answer& answer) { return answer.waiting.size() == 3; }));
  expectOneView(job.awaitViews(1), 2, 6);
  for (auto& place : places) EXPECT_EQ(place.get().number, 2U);
}

}  // namespace
}  // namespace torchft_ext
