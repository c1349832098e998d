#include "host/wait_inquiry.h"

#include <gtest/gtest.h>

#include <utility>

#include "cpp/support/captured_log.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

// Rank 0 of four, with what the others would report.
class WaitInquiryTest : public ::testing::Test {
 protected:
  static constexpr int kSize = 4;
  static constexpr uint64_t kPlace = 5;

  WaitInquiryTest()
      : inquiry_(kSize, times_,
                 {[this](int peer, uint64_t place) { asked_.emplace_back(peer, place); },
                  [this](Clock::time_point when) { woken_at_ = when; },
                  [](int peer) { return "rank " + std::to_string(peer) + " (host b, pid 8)"; }}) {}

  std::shared_ptr<OpState> collective(OpKind kind, uint64_t place = kPlace) {
    auto op = std::make_shared<OpState>(lifecycle_, kind, static_cast<int64_t>(place) + 1,
                                        std::chrono::minutes(30));
    op->setPlace(place);
    return op;
  }
  static WaitInquiry::Wait waitOf(const std::shared_ptr<OpState>& op, int root = 0) {
    return {op, {1, 2, 3}, root};
  }
  // A rank that has issued so many collectives, the last of them 31 s ago.
  static IssueReport reportOf(uint64_t collectives, OpKind last = OpKind::kAllreduce,
                              int root = 0) {
    IssueReport report;
    report.collectives = collectives;
    report.place = kPlace;
    report.main_thread.state = MainThread::kRuns;
    if (collectives == 0) return report;
    report.last = IssueReport::Issued{last, root, static_cast<int64_t>(collectives), seconds(31)};
    if (collectives > kPlace) report.asked = report.last;
    return report;
  }
  // `after` its issue, all of them at once, and what is known then.
  std::string ask(const WaitInquiry::Wait& wait, const std::vector<IssueReport>& reports,
                  Duration after = seconds(2)) {
    const Clock::time_point now = wait.op->issuedAt() + after;
    inquiry_.waits({wait}, now);
    for (size_t i = 0; i < reports.size(); ++i)
      inquiry_.reported(static_cast<int>(i) + 1, reports[i], now);
    return wait.op->waitedFor().value_or("nobody was asked");
  }

  const std::shared_ptr<Lifecycle> lifecycle_ =
      std::make_shared<Lifecycle>(GenerationIdentity{"dp0", 3, 0, kSize});
  const std::shared_ptr<WaitTimes> times_ = std::make_shared<WaitTimes>(kSize);
  std::vector<std::pair<int, uint64_t>> asked_;
  Clock::time_point woken_at_{};
  WaitInquiry inquiry_;
};

TEST_F(WaitInquiryTest, NamesTheRankThatHasNotIssuedAndNoneThatWaits) {
  const auto op = collective(OpKind::kAllreduce);
  EXPECT_EQ(ask(waitOf(op), {reportOf(6), reportOf(5, OpKind::kAllgather), reportOf(6)}),
            "rank 2 (host b, pid 8): its last operation is allgather #5, 31 s ago; its main thread "
            "runs");
}

TEST_F(WaitInquiryTest, NamesARankThatIssuedAnotherOperationInItsPlace) {
  const auto op = collective(OpKind::kAllreduce);
  EXPECT_EQ(ask(waitOf(op), {reportOf(6), reportOf(6), reportOf(6, OpKind::kBarrier)}),
            "rank 3 (host b, pid 8): it issued barrier #6 in its place, 31 s ago; its main thread "
            "runs");
}

TEST_F(WaitInquiryTest, NamesARankThatIssuedItWithAnotherRoot) {
  const auto op = collective(OpKind::kBroadcast);
  const auto other = reportOf(6, OpKind::kBroadcast, 0);
  EXPECT_EQ(ask(waitOf(op, 1),
                {other, reportOf(6, OpKind::kBroadcast, 1), reportOf(6, OpKind::kBroadcast, 1)}),
            "rank 1 (host b, pid 8): it issued broadcast #6 of root 0 in its place, 31 s ago; its "
            "main thread runs");
}

TEST_F(WaitInquiryTest, ARankWithoutAnyOperationIsNamedSo) {
  const auto op = collective(OpKind::kBarrier, 0);
  IssueReport none = reportOf(0);
  none.main_thread = {};
  EXPECT_EQ(ask(waitOf(op), {reportOf(1, OpKind::kBarrier), none, reportOf(1, OpKind::kBarrier)}),
            "rank 2 (host b, pid 8): it has issued no operation");
}

TEST_F(WaitInquiryTest, OneWhoReceivesFromARootNamesTheRootAlone) {
  const auto op = collective(OpKind::kBroadcast);
  EXPECT_EQ(ask(waitOf(op, 2), {reportOf(5), reportOf(5), reportOf(4)}),
            "rank 2 (host b, pid 8): its last operation is allreduce #5, 31 s ago; its main thread "
            "runs");
}

TEST_F(WaitInquiryTest, AllHaveIssuedItIsSaidSo) {
  const auto op = collective(OpKind::kAllreduce);
  EXPECT_EQ(ask(waitOf(op), {reportOf(6), reportOf(7), reportOf(60)}), "");
  EXPECT_EQ(op->whyItWaited(), ", though all ranks have issued it");
}

TEST_F(WaitInquiryTest, NobodyIsNamedBeforeAllThatWereAskedHaveHadTheirTime) {
  const auto op = collective(OpKind::kAllreduce);
  ask(waitOf(op), {reportOf(6), reportOf(5)});
  EXPECT_EQ(op->waitedFor(), std::nullopt);
  ASSERT_EQ(woken_at_, op->issuedAt() + seconds(3));
  inquiry_.settle(woken_at_ - milliseconds(1));
  EXPECT_EQ(op->waitedFor(), std::nullopt);
  inquiry_.settle(woken_at_);
  EXPECT_EQ(op->waitedFor(),
            "rank 2 (host b, pid 8): its last operation is allreduce #5, 31 s ago; its main thread "
            "runs; and for rank 3 (host b, pid 8): it has not answered for 1 s: it is stopped, or "
            "cannot be reached");
}

TEST_F(WaitInquiryTest, AsksAMemberOnceASecondHoweverManyOperationsWait) {
  const CapturedLog captured;
  std::vector<WaitInquiry::Wait> waits{waitOf(collective(OpKind::kAllreduce))};
  for (int i = 0; i < 100; ++i) {
    const auto recv =
        std::make_shared<OpState>(lifecycle_, OpKind::kRecv, i, std::chrono::minutes(30));
    waits.push_back({recv, {i % 3 + 1}});
  }
  const auto now = waits.front().op->issuedAt() + seconds(2);
  inquiry_.waits(waits, now);
  EXPECT_EQ(asked_, (std::vector<std::pair<int, uint64_t>>{{1, kPlace}, {2, kPlace}, {3, kPlace}}));
  for (int peer = 1; peer < kSize; ++peer) inquiry_.reported(peer, reportOf(5), now);
  inquiry_.waits(waits, now + milliseconds(999));
  EXPECT_EQ(asked_.size(), 3U);
  inquiry_.waits(waits, now + seconds(1));
  EXPECT_EQ(asked_.size(), 6U);
}

TEST_F(WaitInquiryTest, OneThatDoesNotAnswerIsNotAskedAgain) {
  const auto wait = waitOf(collective(OpKind::kAllreduce));
  for (int second = 1; second < 10; ++second)
    inquiry_.waits({wait}, wait.op->issuedAt() + seconds(second));
  EXPECT_EQ(asked_.size(), 3U);
  EXPECT_NE(wait.op->whyItWaited().find("rank 1 (host b, pid 8): it has not answered for 8 s"),
            std::string::npos)
      << wait.op->whyItWaited();
}

TEST_F(WaitInquiryTest, ReportsThatNobodyAskedForChangeNothing) {
  const auto op = collective(OpKind::kAllreduce);
  for (int peer = 1; peer < kSize; ++peer) inquiry_.reported(peer, reportOf(0), op->issuedAt());
  EXPECT_EQ(ask(waitOf(op), {reportOf(6), reportOf(6), reportOf(6)}), "");
}

TEST_F(WaitInquiryTest, ThereIsOneLineForEachOperation) {
  const CapturedLog captured;
  const auto op = collective(OpKind::kAllreduce);
  const std::vector<IssueReport> reports{reportOf(6), reportOf(6), reportOf(5)};
  for (int second = 5; second < 9; ++second) ask(waitOf(op), reports, seconds(second));
  ASSERT_EQ(CapturedLog::all().size(), 1U);
  EXPECT_EQ(CapturedLog::all().front(),
            "allreduce #6 on 'dp0' (rank 0/4, generation 3) has waited 5 s for rank 3 (host b, pid "
            "8): its last operation is allreduce #5, 31 s ago; its main thread runs");
  ask(waitOf(collective(OpKind::kAllreduce)), reports, seconds(5));
  EXPECT_EQ(CapturedLog::all().size(), 2U);
}

TEST_F(WaitInquiryTest, NoLineIsWrittenWhereAllHaveIssuedItOrItIsTheLibrarysOwn) {
  const CapturedLog captured;
  ask(waitOf(collective(OpKind::kAllreduce)), {reportOf(6), reportOf(6), reportOf(6)});
  auto own = waitOf(collective(OpKind::kAllreduce));
  own.in_log = false;
  ask(own, {reportOf(5), reportOf(6), reportOf(6)}, seconds(4));
  EXPECT_EQ(CapturedLog::all(), std::vector<std::string>());
  EXPECT_NE(own.op->waitedFor(), "");
}

TEST_F(WaitInquiryTest, AnOperationThatHasWaitedForLessThanItsGenerationAsksAfterWritesNoLine) {
  const CapturedLog captured;
  const auto op = collective(OpKind::kAllreduce);
  EXPECT_NE(ask(waitOf(op), {reportOf(5), reportOf(6), reportOf(6)}, milliseconds(999)), "");
  EXPECT_EQ(CapturedLog::all(), std::vector<std::string>());
}

TEST_F(WaitInquiryTest, AWaitThatHasBecomeOneForBytesNamesNobody) {
  const CapturedLog captured;
  const auto recv =
      std::make_shared<OpState>(lifecycle_, OpKind::kRecv, 7, std::chrono::minutes(30));
  EXPECT_NE(ask({recv, {1}}, {reportOf(5)}), "");
  inquiry_.waits({}, recv->issuedAt() + seconds(3));
  EXPECT_EQ(recv->waitedFor(), "");
  inquiry_.settle(recv->issuedAt() + seconds(9));
  EXPECT_EQ(times_->all()[1], seconds(2));
}

TEST_F(WaitInquiryTest, CountsHowLongItWaitedForWhom) {
  const auto op = collective(OpKind::kAllreduce);
  const std::vector<IssueReport> reports{reportOf(6), reportOf(5), reportOf(6)};
  ask(waitOf(op), reports, seconds(2));
  ask(waitOf(op), reports, seconds(3));
  EXPECT_EQ(times_->all(), (std::vector<Duration>{{}, {}, seconds(3), {}}));
  op->complete(nullptr);
  inquiry_.settle(op->issuedAt() + seconds(9));  // it took less than what was counted
  EXPECT_EQ(times_->all(), (std::vector<Duration>{{}, {}, seconds(3), {}}));
}

}  // namespace
}  // namespace torchft_ext
