// The lanes of a host's members in one process, each with a loop and a lifecycle of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/host/shared_world.h"
#include "cpp/support/wait_for.h"
#include "host/shared_lane.h"
#include "net/event_loop.h"

namespace torchft_ext::shared_test {

inline constexpr size_t kLaneSlot = size_t{64} << 10;

// An allreduce of so many int32, of which each rank gives its own values.
struct Issued {
  std::shared_ptr<OpState> state;
  std::shared_ptr<std::vector<int32_t>> data;

  bool wait() const { return state->wait(testDeadline()) && state->failure() == nullptr; }
};

class LaneWorld {
 public:
  explicit LaneWorld(int size) {
    memories_ = memoriesOf(size, kLaneSlot);
    for (int rank = 0; rank < size; ++rank) {
      loops_.push_back(std::make_unique<EventLoop>("test-" + std::to_string(rank)));
      lifecycles_.push_back(
          std::make_shared<Lifecycle>(GenerationIdentity{"test", 0, rank, size, InJob::kNo}));
      lifecycles_.back()->activate();
    }
    for (int rank = 0; rank < size; ++rank) makeLane(memories_[at(rank)], rank, size);
  }
  ~LaneWorld() {
    for (auto& loop : loops_) loop->stop(testDeadline());
  }

  int size() const { return static_cast<int>(lanes_.size()); }
  SharedLane& lane(int rank) { return *lanes_[at(rank)]; }
  Lifecycle& lifecycle(int rank) { return *lifecycles_[at(rank)]; }
  std::shared_ptr<Lifecycle> sharedLifecycle(int rank) { return lifecycles_[at(rank)]; }
  const std::shared_ptr<SharedMemory>& memory(int rank) { return memories_[at(rank)]; }
  int exchanged(int rank) const { return exchanged_[at(rank)]->load(); }

  Issued allreduce(int rank, int32_t value, size_t items, bool waited = false) {
    Issued issued;
    issued.data = std::make_shared<std::vector<int32_t>>(items);
    std::iota(issued.data->begin(), issued.data->end(), value);
    issued.state = std::make_shared<OpState>(lifecycles_[at(rank)], OpKind::kAllreduce, 1,
                                             std::chrono::seconds(100));
    Operation operation;
    operation.kind = OpKind::kAllreduce;
    operation.dtype = DType::kInt32;
    operation.waited = waited;
    operation.outputs = {
        {reinterpret_cast<uint8_t*>(issued.data->data()), items * sizeof(int32_t)}};
    operation.keep_alive = issued.data;
    lane(rank).add(issued.state, std::move(operation));
    return issued;
  }

  // To rank 0, which expects so many bytes of each.
  Issued gather(int rank, size_t given, size_t expected) {
    Issued issued;
    const auto ranks = static_cast<size_t>(size());
    issued.data = std::make_shared<std::vector<int32_t>>((given + expected * ranks) / 4 + 1);
    auto* bytes = reinterpret_cast<uint8_t*>(issued.data->data());
    issued.state = std::make_shared<OpState>(lifecycles_[at(rank)], OpKind::kGather, 1,
                                             std::chrono::seconds(100));
    Operation operation;
    operation.kind = OpKind::kGather;
    operation.inputs = {{bytes, given}};
    for (size_t i = 0; rank == 0 && i < ranks; ++i)
      operation.outputs.push_back({bytes + given + i * expected, expected});
    operation.keep_alive = issued.data;
    lane(rank).add(issued.state, std::move(operation));
    return issued;
  }

  // What an allreduce gives of which rank r gave first + r.
  bool isSum(const Issued& issued, int32_t first) const {
    const int32_t ranks = size();
    for (size_t i = 0; i < issued.data->size(); ++i) {
      const auto place = static_cast<int32_t>(i);
      if ((*issued.data)[i] != ranks * (first + place) + ranks * (ranks - 1) / 2) return false;
    }
    return true;
  }

  // Each rank's thread runs it.
  void run(const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

  bool advanceLater(int rank) {
    return loops_[at(rank)]->post([this, rank] { lane(rank).advance(); });
  }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }

  void makeLane(std::shared_ptr<SharedMemory> memory, int rank, int size) {
    SharedLane::Callbacks callbacks;
    exchanged_.push_back(std::make_unique<std::atomic<int>>(0));
    callbacks.exchanged = [count = exchanged_.back().get()] { ++*count; };
    callbacks.post = [this, rank] { return advanceLater(rank); };
    callbacks.nudge = [this](int peer) { advanceLater(peer); };
    SharedLane::Terms terms{plansOf(size), false, std::make_shared<SharedUse>()};
    lanes_.push_back(std::make_shared<SharedLane>(
        std::move(memory), rank, size, std::move(terms), lifecycles_[at(rank)],
        std::make_shared<Traffic>(), std::move(callbacks)));
  }
  std::vector<std::shared_ptr<SharedMemory>> memories_;
  std::vector<std::unique_ptr<EventLoop>> loops_;
  std::vector<std::shared_ptr<Lifecycle>> lifecycles_;
  std::vector<std::unique_ptr<std::atomic<int>>> exchanged_;
  std::vector<std::shared_ptr<SharedLane>> lanes_;
};

}  // namespace torchft_ext::shared_test
