// Whole members of an elastic job: who goes on where others end, and who decides that.
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <string>
#include <vector>

#include "cpp/elastic/elastic_jobs.h"
#include "cpp/support/wait_for.h"
#include "elastic/job_store.h"
#include "elastic/next_view.h"
#include "elastic/view_check.h"

namespace torchft_ext {
namespace {

using namespace elastic_test;  // NOLINT(google-build-using-namespace)

TEST(ElasticMember, GoesOnWithoutAMemberThatEnded) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  job.agree(1, {true, true, true});
  job.members.erase(job.members.begin());  // without a word
  expectOneView(job.awaitViews(1), 2, 2);
  for (const Answer& answer : job.agree(2, {true, true})) EXPECT_TRUE(answer.ok);
}

TEST(ElasticMember, AnAgreementEndsWithoutAMemberThatEnded) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  job.members.pop_back();
  for (const Answer& answer : job.agree(1, {true, true})) EXPECT_TRUE(answer.ok);
  expectOneView(job.awaitViews(1), 2, 2);
}

TEST(ElasticMember, HalfNeedsTheWitness) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.members.pop_back();
  expectOneView(job.awaitViews(1), 2, 1);
}

TEST(ElasticMember, HalfWithoutTheWitnessIsNoQuorum) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.store->fail("gone");
  job.members.pop_back();
  const ElasticError error = whyNoView(job.members.front(), 1, std::chrono::seconds(1));
  EXPECT_EQ(error.kind(), ElasticErrorKind::kNoQuorum);
  EXPECT_EQ(countOf("its process ended", error), 1U) << error.what();
}

TEST(ElasticMember, TwoOfFourAtOnceGoOnWithTheWitness) {
  JobOfMembers job;
  job.found(4);
  job.awaitViews(0);
  job.members.resize(2);
  expectOneView(job.awaitViews(1), 2, 2);
}

// It names them long before the deadline, since none of them can come back.
TEST(ElasticMember, ThreeOfFourThatEndedAreNoQuorumAtOnce) {
  JobOfMembers job;
  job.found(4);
  job.awaitViews(0);
  job.members.resize(1);
  const Deadline promptly = Deadline::after(kLong / 2);
  const ElasticError error = whyNoView(job.members.front(), 1);
  EXPECT_EQ(error.kind(), ElasticErrorKind::kNoQuorum);
  EXPECT_EQ(countOf("its process ended", error), 3U) << error.what();
  EXPECT_FALSE(promptly.expired());
}

TEST(ElasticMember, OneOfFourGoesOnByTheStoresRule) {
  JobOfMembers job;
  job.store_rule = true;
  job.found(4);
  job.awaitViews(0);
  job.members.resize(1);
  expectOneView(job.awaitViews(1), 2, 1);
}

// The view after this one, in which that member alone goes on, as another one would have it
// decided that has taken part.
View withoutOthers(const View& view, const MemberId& stays) {
  std::map<MemberId, Promise> promises;
  for (const MemberId& id : idsOf(view.members)) promises[id].leaving = id != stays;
  View next = nextView(view, promises, {}, {});
  setSecret(next, ViewSecret::random());
  next.store_decided = true;
  next.seal = sealOf(next, view.secret);
  return next;
}

// What a process has written to the store may come there when the process is known to be dead.
TEST(ElasticMember, ADecisionOfTheDeadThatComesLateToTheStoreCounts) {
  JobOfMembers job;
  job.store_rule = true;
  job.min_size = 2;
  job.found(3);
  const View first = job.awaitViews(0)[0];
  job.members.resize(1);
  auto waiting = awaitView(job.members[0], 1);
  const int looks = job.store->use("member").looks;
  ASSERT_TRUE(waitFor([&] { return job.store->use("member").looks > looks + 5; }));
  WitnessRequest late;
  late.what = WitnessRequest::What::kDecide;
  late.lineage = first.lineage;
  late.number = 2;
  late.identity = first.witness;
  late.ballot = {7, first.members[1].id};
  late.view = withoutOthers(first, job.members[0]->id());
  EXPECT_EQ(JobStore(job.store->comparing("late"), "job/").ask(late).decided, late.view);
  EXPECT_EQ(waiting.get(), *late.view);
}

TEST(ElasticMember, TooFewByTheStoresRuleAreToldSoLongBeforeTheDeadline) {
  JobOfMembers job;
  job.store_rule = true;
  job.min_size = 2;
  job.found(3);
  job.awaitViews(0);
  job.members.resize(1);
  const Deadline promptly = Deadline::after(kLong / 2);
  const ElasticError error = whyNoView(job.members[0], 1);
  EXPECT_EQ(error.kind(), ElasticErrorKind::kNoQuorum);
  EXPECT_FALSE(promptly.expired());
}

// Nobody is missing: without the store's word the message would say nothing of the cause.
TEST(ElasticMember, IsToldThatTheStoreIsAnotherOneByTheStoresRule) {
  JobOfMembers job;
  job.store_rule = true;
  job.found(2);
  job.awaitViews(0);
  job.store->clear();
  std::string said;  // of the last try: on a busy machine the store's word may come after the first
  EXPECT_TRUE(waitFor([&] {
    const ElasticError error = whyNoView(job.members[0], 1, std::chrono::seconds(1));
    said = error.what();
    return countOf("it has restarted empty", error) == 1;
  })) << said;
}

TEST(ElasticMember, TwoOfThreeGoOnWithoutTheStore) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  job.store->fail("gone");
  job.members.erase(job.members.begin());
  expectOneView(job.awaitViews(1), 2, 2);
}

// The first member looks at it twice a second.
TEST(ElasticMember, AStoreThatIsDownIsNoNewWitness) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.store->fail("gone");
  const Deadline looked = Deadline::after(milliseconds(1200));
  while (!looked.expired()) {
    for (const Answer& answer : job.agree(1, {true, true})) EXPECT_FALSE(answer.new_witness);
  }
}

TEST(ElasticMember, AStoreThatRestartedEmptyIsAppointedAnew) {
  JobOfMembers job;
  job.found(2);
  const View first = job.awaitViews(0)[0];
  job.store->clear();
  ASSERT_TRUE(job.agreeUntil(1, [](const Answer& answer) { return answer.new_witness; }));
  const View second = job.awaitViews(1)[0];
  EXPECT_NE(second.witness, first.witness);
  job.agree(2, {true, true});
  job.members.pop_back();  // half and the new witness go on
  expectOneView(job.awaitViews(2), 3, 1);
}

TEST(ElasticMember, GoesOnAloneWithoutAQuorum) {
  JobOfMembers job;
  job.found(4);
  const View first = job.awaitViews(0)[0];
  job.members.resize(1);
  const auto member = job.members[0];
  EXPECT_THROW(member->awaitView(1, Deadline::after(milliseconds(300))), ElasticError);
  const View alone = member->goOnAlone(Deadline::after(kLong));
  EXPECT_EQ(alone.number, 2U);
  EXPECT_EQ(alone.members.size(), 1U);
  EXPECT_NE(alone.lineage, first.lineage);
  EXPECT_TRUE(job.agree(2, {true})[0].ok);
}

// The rest joins it anew. Its job is one like others: it appoints the store, by which both rules
// let one of two go on.
TEST(ElasticMember, WhoGoesOnAloneTakesNewcomersInAndGoesOnWithoutThem) {
  for (const bool store_rule : {false, true}) {
    JobOfMembers job;
    job.store_rule = store_rule;
    job.found(4);
    job.awaitViews(0);
    job.members.resize(1);
    const View alone = job.members[0]->goOnAlone(Deadline::after(kLong));
    job.members.push_back(job.join(4));
    auto place = awaitView(job.members[1], 0);
    ASSERT_TRUE(waitFor([&] { return !job.members[0]->waiting().empty(); }));
    const View two = job.members[0]->awaitView(alone.number, Deadline::after(kLong));
    expectOneView({two, place.get()}, alone.number + 1, 2);
    EXPECT_EQ(two.lineage, alone.lineage);
    uint64_t number = two.number;
    const auto agree = [&] { return job.agree(number, {true, true})[0]; };
    ASSERT_TRUE(agree().ok);  // so the newcomer counts among those who decide
    if (two.witness.isZero()) {
      ASSERT_TRUE(waitFor([&] { return agree().new_witness; }));
      number = job.awaitViews(number)[0].number;
    }
    job.members.resize(1);
    const View last = job.awaitViews(number)[0];
    EXPECT_EQ(last.members.size(), 1U);
    EXPECT_EQ(last.lineage, alone.lineage);
    EXPECT_TRUE(last.store_decided);
  }
}

TEST(ElasticMember, WhoGoesOnAloneIsGoneForTheOthers) {
  JobOfMembers job;
  job.found(3);
  const View first = job.awaitViews(0)[0];
  const auto alone = job.members.back();
  job.members.pop_back();
  const View other = alone->goOnAlone(Deadline::after(kLong));
  const std::vector<View> views = job.awaitViews(1);
  expectOneView(views, 2, 2);
  EXPECT_EQ(views[0].lineage, first.lineage);
  EXPECT_NE(other.lineage, first.lineage);
}

TEST(ElasticMember, WhoGoesOnAloneEndsTheAttemptToFormWithIt) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  const auto alone = job.members.back();
  job.members.pop_back();
  for (const auto& member : job.members) member->watchForming(true);
  alone->goOnAlone(Deadline::after(kLong));
  for (const auto& member : job.members) {
    EXPECT_TRUE(waitFor([&] { return member->isOver(1); }));
  }
}

}  // namespace
}  // namespace torchft_ext
