// How is the job? What a process is told that takes no part in it, and what it has to prove.
#include "elastic/job_inquiry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>

#include "cpp/elastic/elastic_jobs.h"
#include "cpp/support/wait_for.h"
#include "elastic/meeting_links.h"
#include "elastic/progress.h"
#include "membership/records.h"

namespace torchft_ext {
namespace {

using elastic_test::JobOfMembers;
using elastic_test::kLong;

JobReport sample() {
  JobReport report;
  report.by = ReportedBy::kMember;
  report.self = {MemberId::random(), 1, "a record"};
  report.lineage = Lineage::random();
  report.view = 7;
  report.deciding = true;
  report.min_size = 2;
  report.witness = WitnessId::random();
  report.size = 1;
  report.may_lose = 1;
  report.members = {{report.self, std::chrono::seconds(3), true, true, "it does not answer"}};
  report.waiting = {{{MemberId::random(), 0, "another"}, {}, false, false, ""}};
  report.changes = {{7,
                     1,
                     std::chrono::seconds(2),
                     {"a, pid 1"},
                     {"b, pid 2 (its process ended)"},
                     {{"agree", milliseconds(12)}, {"connect", milliseconds(3)}}}};
  report.waits = {"allreduce #7 on 'default' has waited 5 s for rank 1 (host b, pid 2)"};
  report.steps = ReportedSteps{12, std::chrono::seconds(1), 2.5};
  return report;
}

TEST(JobReport, ComesBackAsItWas) {
  const JobReport report = sample();
  const auto decoded = decodeJobReport(encodeJobReport(report));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(*decoded, report);
}

TEST(JobReport, IsRefusedWhereItIsCutShortOrLonger) {
  const std::string bytes = encodeJobReport(sample());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(decodeJobReport(bytes.substr(0, length))) << length;
  }
  EXPECT_FALSE(decodeJobReport(bytes + "x"));
}

TEST(JobReport, NamesAreCutToWhatIsRead) {
  JobReport report = sample();
  report.changes[0].gone = {std::string(5000, 'x')};
  report.changes[0].joined = std::vector<std::string>(1000, "a name");
  const auto decoded = decodeJobReport(encodeJobReport(report));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->changes[0].gone[0].size(), 512U);
  EXPECT_EQ(decoded->changes[0].joined.size(), 64U);
}

// A view of that many voters; the first so many are there.
JobReport judged(size_t voters, size_t there, bool witness = false) {
  View view;
  JobReport report;
  std::set<MemberId> living;
  for (size_t i = 0; i < voters; ++i) {
    const Member member{MemberId::random(), 1, ""};
    view.members.push_back(member);
    view.voters.push_back(member.id);
    report.members.push_back({member, {}, true, false, ""});
    if (i < there) living.insert(member.id);
  }
  if (witness) view.witness = WitnessId::random();
  judgeLosses(report, view, {}, living, {});
  return report;
}

TEST(JobReport, SaysHowManyMayBeLost) {
  EXPECT_EQ(judged(3, 3).may_lose, 1U);
  EXPECT_EQ(judged(5, 5).may_lose, 2U);
  EXPECT_EQ(judged(4, 4).may_lose, 1U);
  EXPECT_EQ(judged(4, 4, true).may_lose, 2U);  // the store is the fifth voice
  EXPECT_EQ(judged(3, 2).may_lose, 0U);
  EXPECT_EQ(judged(1, 1).may_lose, 0U);
}

TEST(JobReport, SaysOfEachWhetherItMayBeLost) {
  EXPECT_TRUE(judged(3, 3).members[0].may_be_lost);
  const JobReport degraded = judged(3, 2);
  EXPECT_FALSE(degraded.members[0].may_be_lost);
  EXPECT_FALSE(degraded.members[2].may_be_lost);  // it is lost
}

TEST(Progress, CountsStepsASecond) {
  Progress progress;
  const auto start = Clock::now();
  EXPECT_FALSE(progress.at(start));
  for (uint64_t i = 0; i < 100; ++i) progress.note(i, start + i * milliseconds(500));
  const auto steps = progress.at(start + std::chrono::seconds(50));
  ASSERT_TRUE(steps);
  EXPECT_EQ(steps->committed, 99U);
  EXPECT_DOUBLE_EQ(steps->per_second, 2.0);
  EXPECT_EQ(steps->ago, milliseconds(500));
  progress.note(3, start);  // it began again
  EXPECT_EQ(progress.at(start)->committed, 3U);
  EXPECT_DOUBLE_EQ(progress.at(start)->per_second, 0.0);
}

InquiryOptions inquiryInto(const JobOfMembers& job) {
  InquiryOptions options;
  options.job = "test";
  options.store = job.store->comparing("asker");
  options.prefix = "job/";
  return options;
}

JobState ask(const JobOfMembers& job) {
  return JobInquiry(inquiryInto(job)).ask(Deadline::after(kLong));
}

TEST(JobInquiry, AMemberTellsOfTheJob) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  job.members[0]->noteSteps(5);
  const JobState state = ask(job);
  ASSERT_TRUE(state.report);
  EXPECT_EQ(state.report->view, 1U);
  EXPECT_EQ(state.report->members.size(), 3U);
  EXPECT_EQ(state.report->may_lose, 1U);
  EXPECT_TRUE(state.silent.empty());
  EXPECT_EQ(state.heard.size(), 2U);
  for (const auto& [id, answer] : state.heard) EXPECT_EQ(answer.liveness, Liveness::kAlive);
  EXPECT_EQ(job.members[0]->view().number, 1U);
  EXPECT_TRUE(job.members[0]->waiting().empty());  // nobody has asked for a place
}

TEST(JobInquiry, SaysThatAMemberDidNotCome) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  const auto absent = job.members.back();
  job.members.pop_back();
  elastic_test::beAbsent(absent, 1);
  job.awaitViews(1, {absent->id()});
  JobState state;  // the store may not name the newest members yet
  ASSERT_TRUE(waitFor([&] { return (state = ask(job)).report->view == 2; }));
  ASSERT_EQ(state.report->changes.size(), 2U);
  EXPECT_EQ(state.report->changes[0].size, 2U);
  ASSERT_EQ(state.report->changes[0].gone.size(), 1U);
  EXPECT_NE(state.report->changes[0].gone[0].find("did not come to this view"), std::string::npos);
  EXPECT_TRUE(state.report->changes[0].joined.empty());
}

TEST(JobInquiry, SaysWhatTheStoreHolds) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  const JobState state = ask(job);
  EXPECT_TRUE(state.meeting.founding);
  EXPECT_TRUE(state.meeting.trouble.empty());
  ASSERT_TRUE(state.meeting.register_now);
  EXPECT_EQ(state.meeting.register_now->identity, state.report->witness);
  EXPECT_EQ(state.meeting.register_now->voted_for, 0U);
}

TEST(JobInquiry, JobThatNobodyHasFoundedHasNoReport) {
  const JobState state = ask(JobOfMembers());
  EXPECT_FALSE(state.meeting.founding);
  EXPECT_FALSE(state.report);
  EXPECT_EQ(state.meeting.come, 0U);
}

TEST(JobInquiry, JobWhoseMembersHaveGoneIsSilent) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  job.members.clear();
  const JobState state = ask(job);
  EXPECT_TRUE(state.meeting.founding);
  EXPECT_FALSE(state.report);
  EXPECT_EQ(state.silent.size(), 2U);
}

// A process that comes to a member's port with a key, as an inquiry does.
struct Asker {
  Asker() = default;
  explicit Asker(const MeetingKey& key) : links(std::make_unique<MeetingLinks>(loop, key)) {}
  ~Asker() {
    loop.runOnLoop([this] { links.reset(); }, Deadline::after(kLong));
  }
  void come(const SocketAddress& address, bool calls) {
    MeetingLinks::Events events;
    events.on_met = [this, calls](const Standing&) {
      met = true;
      if (!calls) return links->inquire(1);
      links->call(1, 1, StoreCall{});
    };
    events.on_answer = [this](uint64_t, const StoreAnswer&) { answered = true; };
    events.on_report = [this](const std::string&) { answered = true; };
    events.on_end = [this](const std::string&) { ended = true; };
    loop.post([this, address, events] { links->open(1, address, events); });
  }

  std::atomic<bool> met{false};
  std::atomic<bool> answered{false};
  std::atomic<bool> ended{false};
  EventLoop loop{"asker"};
  std::unique_ptr<MeetingLinks> links;
};

class InquiryPlace : public testing::Test {
 protected:
  void SetUp() override {
    job_.found(1);
    job_.awaitViews(0);
    const auto founding = JobStore(job_.store->comparing("look"), "job/").founding();
    ASSERT_TRUE(founding);
    key_ = inquiryKey(founding->key);
    const auto record = decodeRecord(founding->view.members[0].record);
    for (const SocketAddress& one : record->addresses) {
      if (!one.isLocal()) address_ = one;
    }
  }
  JobOfMembers job_;
  MeetingKey key_;
  SocketAddress address_ = *SocketAddress::fromNumeric("127.0.0.1", 0);
};

TEST_F(InquiryPlace, AnswersWhoKnowsTheSecret) {
  Asker asker(key_);
  asker.come(address_, /*calls=*/false);
  EXPECT_TRUE(waitFor([&] { return asker.answered.load(); }));
}

TEST_F(InquiryPlace, TellsNothingToWhoKnowsTheNonceAlone) {
  Asker asker(MeetingKey{key_.job, "another secret"});
  asker.come(address_, /*calls=*/false);
  EXPECT_TRUE(waitFor([&] { return asker.ended.load(); }));
  EXPECT_FALSE(asker.met || asker.answered);
}

TEST_F(InquiryPlace, KeepsNothingForOthers) {
  Asker asker(key_);
  asker.come(address_, /*calls=*/true);
  EXPECT_TRUE(waitFor([&] { return asker.ended.load(); }));
  EXPECT_TRUE(asker.met);
  EXPECT_FALSE(asker.answered);
}

}  // namespace
}  // namespace torchft_ext
