#include "comm/operation_recorder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "comm/op_state.h"

namespace torchft_ext {
namespace {

using State = OperationRecord::State;

Operation sumOf(size_t items) {
  Operation operation;
  operation.kind = OpKind::kAllreduce;
  operation.dtype = DType::kFloat;
  operation.outputs.resize(1);
  operation.outputs.front().bytes = items * sizeof(float);
  return operation;
}

Operation messageTo(int peer) {
  Operation operation;
  operation.kind = OpKind::kSend;
  operation.peer = peer;
  return operation;
}

GenerationRecord generation(int64_t number, int rank = 0) {
  GenerationRecord record;
  record.number = number;
  record.rank = rank;
  return record;
}

std::vector<OperationRecord> operationsOf(const OperationRecorder& recorder, int64_t number) {
  const auto snapshot = recorder.snapshotOf(number);
  return snapshot ? snapshot->operations : std::vector<OperationRecord>{};
}

TEST(OperationRecorder, KeepsTheLastOnesInOrder) {
  OperationRecorder recorder("g", 3);
  recorder.begin(generation(1));
  for (int64_t seq = 1; seq <= 5; ++seq) recorder.issued(sumOf(7), 1, seq, Clock::now());
  const auto kept = operationsOf(recorder, 1);
  ASSERT_EQ(kept.size(), 3u);
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_EQ(kept[i].seq, static_cast<int64_t>(i) + 3);
    EXPECT_EQ(kept[i].collective, i + 3);
    EXPECT_EQ(kept[i].output.sizes[0], 7);
  }
}

TEST(OperationRecorder, FollowsAnOperationToItsEnd) {
  OperationRecorder recorder("g", 10);
  recorder.begin(generation(1));
  const auto at = Clock::now();
  const uint64_t number = recorder.issued(sumOf(1), 1, 1, at);
  EXPECT_EQ(operationsOf(recorder, 1).front().state, State::kScheduled);
  recorder.started(number, at + std::chrono::microseconds(1));
  EXPECT_EQ(operationsOf(recorder, 1).front().state, State::kStarted);
  recorder.ended(number, false, at + std::chrono::microseconds(2));
  const OperationRecord record = operationsOf(recorder, 1).front();
  EXPECT_EQ(record.state, State::kCompleted);
  EXPECT_LT(record.issued, record.started);
  EXPECT_LT(record.started, record.ended);
  recorder.ended(recorder.issued(sumOf(1), 1, 2, at), true, at);
  EXPECT_EQ(operationsOf(recorder, 1).back().state, State::kFailed);
}

TEST(OperationRecorder, LeavesAnotherOperationAloneWhenTheRingHasGoneRound) {
  OperationRecorder recorder("g", 2);
  recorder.begin(generation(1));
  const uint64_t slow = recorder.issued(sumOf(1), 1, 1, Clock::now());
  for (int64_t seq = 2; seq <= 3; ++seq) recorder.issued(sumOf(1), 1, seq, Clock::now());
  recorder.started(slow, Clock::now());
  recorder.ended(slow, true, Clock::now());
  for (const auto& record : operationsOf(recorder, 1)) EXPECT_EQ(record.state, State::kScheduled);
}

TEST(OperationRecorder, CountsOnlyCollectivesThatAllRanksCountAlike) {
  OperationRecorder recorder("g", 10);
  recorder.begin(generation(1));
  Operation nested = sumOf(1);
  nested.name = 12;
  Operation nameless = sumOf(1);
  nameless.in_nameless_callback = true;
  for (const Operation& each : {sumOf(1), messageTo(3), nested, nameless, sumOf(1)})
    recorder.issued(each, 1, 1, Clock::now());
  std::vector<uint64_t> numbers;
  for (const auto& record : operationsOf(recorder, 1)) numbers.push_back(record.collective);
  EXPECT_EQ(numbers, (std::vector<uint64_t>{1, 0, 0, 0, 2}));
}

TEST(OperationRecorder, GenerationsAreApartAndTheirCollectivesCountedAnew) {
  OperationRecorder recorder("g", 10);
  recorder.begin(generation(1, 3));
  recorder.issued(sumOf(1), 1, 1, Clock::now());
  recorder.begin(generation(2, 1));
  recorder.issued(sumOf(1), 2, 1, Clock::now());
  const auto second = recorder.snapshotOf(2);
  ASSERT_TRUE(second);
  ASSERT_EQ(second->operations.size(), 1u);
  EXPECT_EQ(second->operations.front().collective, 1u);
  EXPECT_EQ(second->generation.rank, 1);
  EXPECT_EQ(second->generation.first_rank, 3);
  EXPECT_EQ(recorder.snapshots().size(), 2u);
  EXPECT_FALSE(recorder.snapshotOf(3));
}

TEST(OperationRecorder, KeepsSoManyGenerationsAndNoMore) {
  OperationRecorder recorder("g", 10);
  const auto most = static_cast<int64_t>(OperationRecorder::kGenerationsKept);
  for (int64_t number = 1; number <= most + 1; ++number) recorder.begin(generation(number));
  EXPECT_EQ(recorder.snapshots().size(), OperationRecorder::kGenerationsKept);
  EXPECT_FALSE(recorder.snapshotOf(1));
}

TEST(OperationRecorder, WithoutCapacityItDumpsNothingAndAnswersAllTheSame) {
  OperationRecorder recorder("g", 0);
  EXPECT_FALSE(recorder.dumps());
  recorder.begin(generation(1));
  recorder.issued(sumOf(1), 1, 7, Clock::now(), 0);
  EXPECT_TRUE(recorder.snapshots().empty());
  EXPECT_FALSE(recorder.snapshotOf(1));
  EXPECT_EQ(recorder.issuedIn(1, 0).at_place->seq, 7);
}

TEST(OperationRecorder, TellsTheLastOperationAndTheCollectiveAtAPlace) {
  OperationRecorder recorder("g", 10);
  EXPECT_FALSE(recorder.issuedIn(1, 0).last) << "none yet";
  recorder.issued(sumOf(1), 1, 1, Clock::now(), 0);
  recorder.issued(messageTo(3), 1, 2, Clock::now());
  const auto issued = recorder.issuedIn(1, 0);
  EXPECT_EQ(issued.collectives, 1U);
  EXPECT_EQ(issued.last->kind, OpKind::kSend);
  EXPECT_EQ(issued.at_place->seq, 1);
  EXPECT_FALSE(recorder.issuedIn(1, 1).at_place) << "not issued yet";
  EXPECT_FALSE(recorder.issuedIn(2, 0).last) << "of another generation";
  recorder.issued(messageTo(3), 2, 1, Clock::now());
  EXPECT_EQ(recorder.issuedIn(2, 0).collectives, 0U) << "counted anew";
  EXPECT_FALSE(recorder.issuedIn(1, 0).last) << "it is over";
}

TEST(OperationRecorder, ForgetsCollectivesOfLongAgoAndNamesNoOtherInTheirPlace) {
  constexpr uint64_t kMany = 30;
  OperationRecorder recorder("g", 10);
  for (uint64_t place = 0; place < kMany; ++place)
    recorder.issued(sumOf(1), 1, static_cast<int64_t>(place), Clock::now(), place);
  for (uint64_t place = 0; place < kMany; ++place) {
    const auto found = recorder.issuedIn(1, place).at_place;
    EXPECT_EQ(found.has_value(), kMany - place <= 10) << place;
    if (found) {
      EXPECT_EQ(found->seq, static_cast<int64_t>(place));
    }
  }
}

TEST(OperationRecorder, CountsBytesOfTheLargerSideAndTimeByKind) {
  OperationRecorder recorder("g", 10);
  Operation scatter = sumOf(2);
  scatter.kind = OpKind::kReduceScatter;
  scatter.inputs.resize(3, scatter.outputs.front());
  const auto at = Clock::now();
  recorder.ended(recorder.issued(sumOf(5), 1, 1, at), false, at + std::chrono::seconds(1));
  recorder.ended(recorder.issued(sumOf(5), 1, 2, at), true, at + std::chrono::seconds(2));
  recorder.issued(scatter, 1, 3, at);
  const OperationTotals totals = recorder.totals();
  const auto of = [](OpKind kind) { return static_cast<size_t>(kind); };
  EXPECT_EQ(totals.bytes[of(OpKind::kAllreduce)], 40U);
  EXPECT_EQ(totals.bytes[of(OpKind::kReduceScatter)], 24U);
  EXPECT_EQ(totals.time[of(OpKind::kAllreduce)], std::chrono::seconds(3));
  EXPECT_EQ(totals.time[of(OpKind::kReduceScatter)], Duration::zero()) << "it has not ended";
}

TEST(OperationRecorder, SaysWhomTheLongestWaitIsFor) {
  OperationRecorder recorder("dp0", 10);
  GenerationRecord two = generation(1);
  two.members = {{"a", 11}, {"b", 12}};
  recorder.begin(two);
  const auto at = Clock::now() - std::chrono::seconds(5);
  const uint64_t first = recorder.issued(sumOf(1), 1, 811, at);
  const uint64_t second = recorder.issued(sumOf(1), 1, 812, at);
  EXPECT_EQ(recorder.waits(), "") << "nobody has asked";
  recorder.waitedFor(second, {1});
  EXPECT_TRUE(recorder.waits().starts_with("allreduce #812 on 'dp0' has waited 5"))
      << recorder.waits();
  EXPECT_NE(recorder.waits().find(" s for rank 1 (host b, pid 12)"), std::string::npos);
  recorder.waitedFor(first, {0, 1, 2, 3, 4});
  EXPECT_EQ(operationsOf(recorder, 1).front().waiters, OperationRecord::kMostWaitedFor);
  recorder.ended(first, false, Clock::now());
  recorder.ended(second, true, Clock::now());
  EXPECT_EQ(recorder.waits(), "");
}

TEST(OperationRecorder, ShapesBeyondTheBoundKeepTheNumberOfItems) {
  Shape shape;
  shape.dimensions = 0;
  for (int i = 0; i < 9; ++i) shape.add(2);
  EXPECT_EQ(shape.dimensions, Shape::kMostDimensions);
  int64_t items = 1;
  for (const int64_t size : shape.sizes) items *= size;
  EXPECT_EQ(items, 1 << 9);
}

TEST(OperationRecorder, AnOperationsStateEntersItsCourse) {
  const auto recorder = std::make_shared<OperationRecorder>("g", 4);
  recorder->begin(generation(1));
  OpState op(std::make_shared<Lifecycle>(GenerationIdentity{}, nullptr, kAskAfter, recorder),
             OpKind::kAllreduce, 1, std::chrono::seconds(1));
  op.recordAs(recorder->issued(sumOf(1), 1, 1, op.issuedAt()));
  op.noteStarted();
  op.setWaitedFor("rank 1", {1});
  EXPECT_EQ(operationsOf(*recorder, 1).front().waited_for[0], 1);
  op.complete(nullptr);
  op.noteStarted();  // too late
  EXPECT_EQ(operationsOf(*recorder, 1).front().state, State::kCompleted);
}

// As in a group: issue one by one, ends from anywhere, and somebody who looks meanwhile.
TEST(OperationRecorder, ThreadsMayEnterAndLookAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  OperationRecorder recorder("g", 64);
  recorder.begin(generation(1));
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&recorder] {
      for (int i = 0; i < kEach; ++i) {
        const uint64_t number = recorder.issued(sumOf(1), 1, i, Clock::now());
        recorder.started(number, Clock::now());
        recorder.ended(number, false, Clock::now());
      }
    });
  }
  for (int look = 0; look < 100; ++look) {
    EXPECT_LE(operationsOf(recorder, 1).size(), 64u);
    const auto last = recorder.issuedIn(1, kNoPlace).last;
    EXPECT_TRUE(!last || last->kind == OpKind::kAllreduce);
  }
  for (auto& thread : threads) thread.join();
  const auto kept = operationsOf(recorder, 1);
  ASSERT_EQ(kept.size(), 64u);
  EXPECT_EQ(kept.back().number, static_cast<uint64_t>(kThreads) * kEach);
  EXPECT_TRUE(std::all_of(kept.begin(), kept.end(), [](const OperationRecord& record) {
    return record.state == State::kCompleted;
  }));
}

}  // namespace
}  // namespace torchft_ext
