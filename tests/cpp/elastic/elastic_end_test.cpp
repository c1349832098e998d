// What is left of a job that has ended well: processes that come later, and spares, are told so.
#include <atomic>

#include "cpp/elastic/elastic_jobs.h"
#include "elastic/job_founder.h"

namespace torchft_ext {
namespace {

using elastic_test::awaitView;
using elastic_test::JobOfMembers;
using elastic_test::kLong;
using elastic_test::MemberPtr;
using elastic_test::whyNoView;

bool recordEnd(const MemberPtr& member) {
  return member->recordEnd(Deadline::after(kLong));
}

// Of one that joins the job of two and is told that it is over; else nothing.
std::optional<JobOverError> whyOver(const JobOfMembers& job) {
  try {
    job.join(2);
  } catch (const JobOverError& error) {
    return error;
  }
  return std::nullopt;
}

TEST(ElasticEnd, WhoComesLaterIsToldWhenAndByHowManyItEnded) {
  using std::chrono::system_clock;
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  EXPECT_FALSE(whyOver(job));
  const auto before = std::chrono::floor<std::chrono::seconds>(system_clock::now());
  for (const MemberPtr& member : job.members) EXPECT_TRUE(recordEnd(member));
  job.members.clear();
  const auto error = whyOver(job);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->members(), 2);
  EXPECT_GE(error->endedAt(), before);
  EXPECT_LE(error->endedAt(), system_clock::now());
  EXPECT_NE(std::string(error->what()).find("another run needs another name"), std::string::npos);
}

TEST(ElasticEnd, ASpareThatWaitsIsTold) {
  JobOfMembers job;
  job.found(2, 2);
  job.awaitViews(0);
  const MemberPtr spare = job.join(2);
  auto waiting = std::async(std::launch::async, [&] { return whyNoView(spare, 0); });
  recordEnd(job.members[0]);
  EXPECT_EQ(waiting.get().kind(), ElasticErrorKind::kJobOver);
}

TEST(ElasticEnd, AMemberGoesOnWhateverIsOnRecord) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  recordEnd(job.members[0]);
  elastic_test::expectOneView(job.awaitViews(1), 2, 2);
}

TEST(ElasticEnd, AStoreThatHasRestartedEmptyBeforeTheEndKnowsIt) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.store->clear();
  EXPECT_TRUE(recordEnd(job.members[1]));
  EXPECT_TRUE(whyOver(job));
}

TEST(ElasticEnd, AStoreOfAnotherJobIsLeftAlone) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.store->put("job/founding", "of somebody else");
  EXPECT_FALSE(recordEnd(job.members[0]));
  EXPECT_FALSE(job.store->peek("job/end/" + job.members[0]->view().lineage.hex()));
}

TEST(ElasticEnd, AStoreThatDoesNotAnswerIsNotWaitedForLongerThanSaid) {
  JobOfMembers job;
  job.found(1);
  job.awaitViews(0);
  job.store->block();
  EXPECT_FALSE(job.members[0]->recordEnd(Deadline::after(milliseconds(50))));
  job.store->release();
}

TEST(ElasticEnd, AnUnreadableRecordIsNone) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.store->put("job/end/" + job.members[0]->view().lineage.hex(), "three");
  EXPECT_FALSE(whyOver(job));
}

TEST(ElasticEnd, ANewcomerOfAJobWithoutQuorumIsToldWhoIsMissingAndTheWaysOut) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  job.members.resize(1);  // the others end without a word
  const MemberPtr newcomer = job.join(3);
  // Until it has noticed that.
  ElasticError error = whyNoView(newcomer, 0, milliseconds(100));
  for (const Deadline end = Deadline::after(kLong); !end.expired();) {
    if (elastic_test::countOf("its process ended", error) == 2) break;
    error = whyNoView(newcomer, 0, milliseconds(100));
  }
  EXPECT_EQ(error.kind(), ElasticErrorKind::kTimeout);
  EXPECT_EQ(elastic_test::countOf("its process ended", error), 2U);
  EXPECT_EQ(elastic_test::countOf("may have lost its quorum", error), 1U);
  EXPECT_EQ(elastic_test::countOf("Two ways out", error), 1U);
}

Member memberOf(uint8_t number) {
  Member member;
  member.id.bytes[0] = number;
  return member;
}

Founding findPlace(JobStoreThread& store, uint8_t number, const Cancelled& cancelled = {}) {
  const JobFounder founder(store, "test", 2, {});
  return founder.findPlace(memberOf(number), Deadline::after(kLong), cancelled).founding;
}

TEST(ElasticEnd, AFounderThatIsToldToLeaveGivesUpItsSeat) {
  const auto store = std::make_shared<MemoryStore>();
  JobStoreThread thread("test", store->comparing("me"), "job/");
  const auto sits = [&] { return store->peek("job/seat/0").has_value(); };
  try {
    findPlace(thread, 1, sits);
    ADD_FAILURE() << "expected no founding";
  } catch (const ElasticError& error) {
    EXPECT_EQ(error.kind(), ElasticErrorKind::kLeftOut);
  }
  EXPECT_FALSE(sits());
  JobStoreThread other("test", store->comparing("other"), "job/");
  auto first = std::async(std::launch::async, [&] { return findPlace(thread, 2); });
  const Founding founding = findPlace(other, 3);
  EXPECT_EQ(founding.view, first.get().view);
  EXPECT_FALSE(founding.view.has(memberOf(1).id));
}

}  // namespace
}  // namespace torchft_ext
