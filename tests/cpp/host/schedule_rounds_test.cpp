#include <gtest/gtest.h>

#include <algorithm>

#include "cpp/host/schedule_support.h"
#include "host/schedule.h"

namespace torchft_ext {
namespace {

// How many frames follow one another at most, each for want of the one before it.
class Rounds {
 public:
  // Of a collective of `bytes` bytes in each part.
  Rounds(OpKind kind, int size, size_t bytes, int root = 0) : memory_(bytes) {
    const Buffer part{memory_.data(), bytes};
    const std::vector<Buffer> one{part};
    const std::vector<Buffer> all(static_cast<size_t>(size), part);
    for (int rank = 0; rank < size; ++rank) {
      Operation operation = operationOf<uint8_t>(kind, ReduceKind::kSum, root);
      const bool gathers = kind == OpKind::kAllgather || kind == OpKind::kAlltoall;
      const bool scatters = kind == OpKind::kReduceScatter || kind == OpKind::kAlltoall;
      const bool in_place = kind == OpKind::kAllreduce || kind == OpKind::kBroadcast;
      const bool is_root = rank == root;
      operation.outputs = gathers || (kind == OpKind::kGather && is_root) ? all : one;
      operation.inputs = scatters || (kind == OpKind::kScatter && is_root) ? all : one;
      if (in_place || (kind == OpKind::kScatter && !is_root)) operation.inputs.clear();
      if ((kind == OpKind::kGather || kind == OpKind::kReduce) && !is_root)
        operation.outputs.clear();
      schedules_.push_back(makeSchedule(operation, rank, size, {}));
    }
    for (const Schedule& schedule : schedules_) depth_.emplace_back(schedule.steps.size(), -1);
  }

  int count() {
    int most = 0;
    for (size_t rank = 0; rank < schedules_.size(); ++rank) {
      for (size_t i = 0; i < schedules_[rank].steps.size(); ++i) {
        most = std::max(most, depthOf(rank, i));
      }
    }
    return most;
  }

 private:
  int depthOf(size_t rank, size_t index) {
    int& known = depth_[rank][index];
    if (known >= 0) return known;
    const Step& step = schedules_[rank].steps[index];
    int depth = 0;
    for (const int before : step.after) {
      if (before >= 0) depth = std::max(depth, depthOf(rank, static_cast<size_t>(before)));
    }
    if (step.kind == Step::Kind::kRecv || step.kind == Step::Kind::kRecvReduce) {
      const auto peer = static_cast<size_t>(step.peer);
      depth = std::max(depth, 1 + depthOf(peer, sendFor(rank, index)));
    }
    return depth_[rank][index] = depth;
  }

  // The frames of one pair match in list order.
  size_t sendFor(size_t rank, size_t index) const {
    const Step& receive = schedules_[rank].steps[index];
    const auto before = [&](const Step& step) {
      return step.peer == receive.peer &&
             (step.kind == Step::Kind::kRecv || step.kind == Step::Kind::kRecvReduce);
    };
    const auto& own = schedules_[rank].steps;
    auto number =
        std::count_if(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(index), before);
    const auto& theirs = schedules_[static_cast<size_t>(receive.peer)].steps;
    for (size_t i = 0; i < theirs.size(); ++i) {
      const bool matches =
          theirs[i].kind == Step::Kind::kSend && theirs[i].peer == static_cast<int>(rank);
      if (matches && number-- == 0) return i;
    }
    ADD_FAILURE() << "a frame that nobody sends";
    return 0;
  }

  std::vector<uint8_t> memory_;
  std::vector<Schedule> schedules_;
  std::vector<std::vector<int>> depth_;
};

TEST(ScheduleRounds, FewBytesTakeALogarithmicNumberOfRounds) {
  for (const int size : {2, 3, 4, 5, 8, 9, 16, 31, 64, 100}) {
    int log2 = 0;  // rounded up
    while ((1 << log2) < size) ++log2;
    SCOPED_TRACE("world " + std::to_string(size));
    for (const size_t bytes : {size_t{1}, ScheduleTuning{}.small_bytes}) {
      for (const OpKind kind : {OpKind::kBroadcast, OpKind::kReduce, OpKind::kAllgather}) {
        const int rounds = Rounds(kind, size, bytes, size / 2).count();
        EXPECT_TRUE(rounds >= 1 && rounds <= log2) << toString(kind) << ": " << rounds;
      }
      // Of ranks past a power of two, one round before and one after.
      const int rounds = Rounds(OpKind::kAllreduce, size, bytes).count();
      EXPECT_TRUE(rounds >= log2 && rounds <= log2 + 1) << "allreduce: " << rounds;
    }
    EXPECT_EQ(Rounds(OpKind::kBarrier, size, 1).count(), log2);
    for (const OpKind kind :
         {OpKind::kGather, OpKind::kScatter, OpKind::kAlltoall, OpKind::kReduceScatter}) {
      EXPECT_EQ(Rounds(kind, size, 1).count(), 1) << toString(kind);
    }
  }
}

}  // namespace
}  // namespace torchft_ext
