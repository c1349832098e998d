#include "comm/issue_log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace torchft_ext {
namespace {

IssuedOperation operationOf(OpKind kind, int64_t seq, int root = 0) {
  return {kind, root, seq, Clock::time_point(Duration(seq))};
}

TEST(IssueLog, TellsTheLastOperationAndTheCollectivesBeforeIt) {
  IssueLog log;
  EXPECT_EQ(log.last(), std::nullopt);
  EXPECT_EQ(log.collective(0), std::nullopt);
  log.note(operationOf(OpKind::kBroadcast, 1, 3), true);
  log.note(operationOf(OpKind::kSend, 2), false);
  EXPECT_EQ(log.collectives(), 1U);
  EXPECT_EQ(log.last(), operationOf(OpKind::kSend, 2));
  EXPECT_EQ(log.collective(0), operationOf(OpKind::kBroadcast, 1, 3));
  EXPECT_EQ(log.collective(1), std::nullopt);
}

TEST(IssueLog, ForgetsCollectivesOfLongAgoAndNamesNoOtherInTheirPlace) {
  IssueLog log;
  constexpr uint64_t kMany = 3 * IssueLog::kKept;
  for (uint64_t place = 0; place < kMany; ++place)
    log.note(operationOf(OpKind::kAllreduce, static_cast<int64_t>(place)), true);
  for (uint64_t place = 0; place < kMany; ++place) {
    const auto found = log.collective(place);
    EXPECT_EQ(found.has_value(), kMany - place < IssueLog::kKept) << place;
    if (found) {
      EXPECT_EQ(found->seq, static_cast<int64_t>(place));
    }
  }
}

TEST(IssueLog, IsReadWhileItIsWritten) {
  IssueLog log;
  std::atomic<bool> over{false};
  std::thread issuer([&] {
    for (int64_t seq = 0; seq < 200000; ++seq)
      log.note(
          {OpKind::kScatter, static_cast<int>(seq % 1000), seq, Clock::time_point(Duration(seq))},
          true);
    over = true;
  });
  while (!over) {
    const auto last = log.last();
    if (!last) continue;
    EXPECT_EQ(last->root, last->seq % 1000);
    EXPECT_EQ(last->at.time_since_epoch().count(), last->seq);
    const uint64_t place = log.collectives() - 1;
    if (const auto found = log.collective(place)) {
      EXPECT_EQ(found->seq, static_cast<int64_t>(place));
    }
  }
  issuer.join();
}

}  // namespace
}  // namespace torchft_ext
