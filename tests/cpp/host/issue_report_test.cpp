#include "host/issue_report.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "base/main_thread_waits.h"
#include "net/frame.h"

namespace torchft_ext {
namespace {

class IssueReportTest : public ::testing::Test {
 protected:
  static constexpr int64_t kGeneration = 3;

  IssueReportTest() {
    Operation broadcast;
    broadcast.kind = OpKind::kBroadcast;
    broadcast.root = 2;
    recorder_.issued(broadcast, kGeneration, 7, Clock::now(), 0);
    Operation recv;
    recv.kind = OpKind::kRecv;
    recorder_.issued(recv, kGeneration, 8, Clock::now() - std::chrono::seconds(31));
  }

  OperationRecorder recorder_{"g", 10};
};

TEST_F(IssueReportTest, ArrivesAsItWasMade) {
  const auto report = decodeReport(encode(reportOf(recorder_, kGeneration, 0)));
  ASSERT_TRUE(report && report->asked && report->last);
  EXPECT_EQ(report->collectives, 1U);
  EXPECT_EQ(report->place, 0U);
  EXPECT_EQ(report->asked->kind, OpKind::kBroadcast);
  EXPECT_EQ(report->asked->root, 2);
  EXPECT_EQ(report->asked->seq, 7);
  EXPECT_EQ(report->last->kind, OpKind::kRecv);
  EXPECT_GE(report->last->age, std::chrono::seconds(31));
}

TEST_F(IssueReportTest, SaysThatNothingWasIssued) {
  const auto report = decodeReport(encode(reportOf(recorder_, kGeneration + 1, kNoPlace)));
  ASSERT_TRUE(report);
  EXPECT_FALSE(report->asked || report->last);
  EXPECT_EQ(report->collectives, 0U);
}

TEST_F(IssueReportTest, HasItsPlaceInAFrameOfFixedSize) {
  const size_t bytes = encode(reportOf(recorder_, kGeneration, 0)).size();
  EXPECT_LE(bytes, longestPayload(FrameType::kReport));
  EXPECT_EQ(encode(reportOf(recorder_, kGeneration + 1, 5)).size(), bytes);
}

TEST_F(IssueReportTest, RefusesBytesThatAreNone) {
  const std::string good = encode(reportOf(recorder_, kGeneration, 0));
  for (size_t length = 0; length < good.size(); ++length)
    EXPECT_EQ(decodeReport(good.substr(0, length)), std::nullopt) << length;
  EXPECT_EQ(decodeReport(good + "x"), std::nullopt);
  std::string other_kind = good;
  other_kind[2 * sizeof(uint64_t)] = 100;
  EXPECT_EQ(decodeReport(other_kind), std::nullopt);
  std::string other_state = good;
  other_state.back() = 100;
  EXPECT_EQ(decodeReport(other_state), std::nullopt);
}

TEST_F(IssueReportTest, TellsTheMainThreadsStateAsTheKernelHasIt) {
  EXPECT_EQ(mainThreadNow().state, MainThread::kRuns);  // this one
  const MainThreadWaits waits;
  EXPECT_EQ(mainThreadNow().state, MainThread::kWaits);
}

TEST_F(IssueReportTest, TellsForHowLongTheMainThreadHasSlept) {
  std::vector<MainThreadNow> looks;
  std::thread other([&] {
    for (int look = 0; look < 3; ++look) {
      looks.push_back(mainThreadNow());
      std::this_thread::sleep_for(milliseconds(30));
    }
  });
  other.join();  // without a turn until the other one ends
  EXPECT_EQ(looks.back().state, MainThread::kSleeps);
  EXPECT_GE(looks.back().for_at_least, milliseconds(30));
  EXPECT_LT(looks.back().for_at_least, std::chrono::minutes(1));
  mainThreadNow();  // this turn is another one
  std::thread([&] { looks.push_back(mainThreadNow()); }).join();
  EXPECT_LT(looks.back().for_at_least, looks[2].for_at_least);
}

TEST_F(IssueReportTest, SaysInWordsForHowManySecondsTheMainThreadHasSlept) {
  EXPECT_EQ(describe(MainThreadNow{MainThread::kSleeps, milliseconds(999)}),
            "its main thread sleeps");
  EXPECT_EQ(describe(MainThreadNow{MainThread::kSleeps, milliseconds(3900)}),
            "its main thread sleeps, for at least 3 s");
  EXPECT_EQ(describe(MainThreadNow{}), "");
}

}  // namespace
}  // namespace torchft_ext
