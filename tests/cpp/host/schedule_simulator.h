// Plays the schedules of all ranks in memory, with random interleavings and connections that buffer
// little or nothing.
//
// It fails on a deadlock, on frames that do not match, on a send whose bytes change before it is
// done, and on two steps that touch the same memory at the same time, one of them writing.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "host/schedule.h"

namespace torchft_ext {

template <typename T>
T combine(T a, T b, ReduceKind op) {
  switch (op) {
    case ReduceKind::kSum:
    case ReduceKind::kAvg:
    case ReduceKind::kPreMulSum:
      return static_cast<T>(a + b);
    case ReduceKind::kProduct:
      return static_cast<T>(a * b);
    // Deliberately not symmetric for -0.0 and 0.0, like the processor's instructions.
    case ReduceKind::kMin:
      return a < b ? a : b;
    case ReduceKind::kMax:
      return a > b ? a : b;
    case ReduceKind::kBand:
    case ReduceKind::kBor:
    case ReduceKind::kBxor:
      break;  // to a schedule one reduction is like another
  }
  return a;
}

template <typename T>
class Simulator {
 public:
  // capacity: how many payload bytes each connection holds; 0: a send and its receive go hand in
  // hand, which is the worst case (whatever is free of deadlock then is so with any buffer).
  Simulator(std::vector<Operation> operations, const ScheduleTuning& tuning, size_t capacity,
            uint32_t seed)
      : operations_(std::move(operations)), capacity_(capacity), random_(seed) {
    const int size = worldSize();
    pipes_.resize(static_cast<size_t>(size) * static_cast<size_t>(size));
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(prepare(makeSchedule(at(operations_, rank), rank, size, tuning)));
      checkForm(rank);
    }
  }

  void run() {
    while (!allDone()) {
      if (!sweep()) {
        ADD_FAILURE() << "deadlock: " << describeStuck();
        return;
      }
      if (::testing::Test::HasFailure()) return;
    }
    for (const Pipe& pipe : pipes_) {
      EXPECT_TRUE(pipe.bytes.empty() && pipe.frames.empty()) << "bytes that nobody received";
    }
  }

  size_t stepCount(int rank) const { return at(ranks_, rank).schedule.steps.size(); }

 private:
  struct Rank {
    Schedule schedule;
    std::vector<int> waits_for;
    std::vector<std::vector<int>> dependents;
    std::vector<int> active;  // begun, not done
    std::vector<int> local_ready;
    std::vector<std::deque<int>> sends, receives;  // by peer, in list order
    size_t undone = 0;
  };
  struct Pipe {
    std::string bytes;
    std::deque<size_t> frames;  // lengths of frames begun by the sender and not by the receiver
    int send = -1, receive = -1;
    size_t sent = 0;
    std::string snapshot, received;
  };

  template <typename Container>
  static auto& at(Container& container, int index) {
    return container[static_cast<size_t>(index)];
  }
  int worldSize() const { return static_cast<int>(operations_.size()); }
  Pipe& pipe(int from, int to) { return at(pipes_, from * worldSize() + to); }

  Rank prepare(Schedule schedule) {
    Rank rank;
    const size_t count = schedule.steps.size();
    rank.waits_for.resize(count);
    rank.dependents.resize(count);
    rank.sends.resize(operations_.size());
    rank.receives.resize(operations_.size());
    rank.undone = count;
    for (size_t i = 0; i < count; ++i) {
      const Step& step = schedule.steps[i];
      for (const int before : step.after) {
        if (before < 0) continue;
        EXPECT_LT(before, static_cast<int>(i));
        ++rank.waits_for[i];
        at(rank.dependents, before).push_back(static_cast<int>(i));
      }
      if (step.kind == Step::Kind::kSend) {
        at(rank.sends, step.peer).push_back(static_cast<int>(i));
      } else if (receives(step)) {
        at(rank.receives, step.peer).push_back(static_cast<int>(i));
      } else if (rank.waits_for[i] == 0) {
        rank.local_ready.push_back(static_cast<int>(i));
      }
    }
    rank.schedule = std::move(schedule);
    return rank;
  }

  void checkForm(int rank) {
    for (const Step& step : at(ranks_, rank).schedule.steps) {
      EXPECT_GT(step.bytes, 0U);
      EXPECT_NE(step.data, nullptr);
      const bool remote = step.kind == Step::Kind::kSend || receives(step);
      EXPECT_EQ(remote, step.peer >= 0);
      EXPECT_NE(step.peer, rank);
      EXPECT_LT(step.peer, worldSize());
      const bool computes = step.kind != Step::Kind::kSend && step.kind != Step::Kind::kRecv &&
                            step.kind != Step::Kind::kCopy;
      if (computes) {
        EXPECT_EQ(step.bytes % sizeof(T), 0U) << "a reduction of half an item";
      }
    }
  }

  static bool receives(const Step& step) {
    return step.kind == Step::Kind::kRecv || step.kind == Step::Kind::kRecvReduce;
  }
  bool allDone() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.undone == 0; });
  }
  bool chance() { return random_() % 3 != 0; }

  // Everything that could happen gets a chance, in random order. False: nothing can happen any
  // more.
  bool sweep() {
    std::vector<int> order(pipes_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::shuffle(order.begin(), order.end(), random_);
    bool progressed = false;
    for (const int index : order) {
      const int from = index / worldSize();
      const int to = index % worldSize();
      if (from == to) {
        progressed |= runOneLocal(from);
      } else {
        progressed |= transfer(from, to);
      }
    }
    return progressed;
  }

  bool runOneLocal(int index) {
    Rank& rank = at(ranks_, index);
    if (rank.local_ready.empty()) return false;
    const size_t pick = random_() % rank.local_ready.size();
    const int step = rank.local_ready[pick];
    rank.local_ready.erase(rank.local_ready.begin() + static_cast<std::ptrdiff_t>(pick));
    begin(rank, step);
    apply(rank.schedule.steps[static_cast<size_t>(step)], index);
    finish(rank, step);
    return true;
  }

  bool transfer(int from, int to) {
    Pipe& line = pipe(from, to);
    bool progressed = startSend(line, from, to);
    progressed |= startReceive(line, from, to);
    progressed |= moveBytes(line, from, to);
    if (line.send >= 0 && line.sent == line.snapshot.size()) {
      Rank& sender = at(ranks_, from);
      const Step& step = at(sender.schedule.steps, line.send);
      EXPECT_EQ(std::memcmp(step.data, line.snapshot.data(), step.bytes), 0)
          << "bytes changed before they were sent";
      finish(sender, std::exchange(line.send, -1));
    }
    if (line.receive >= 0) progressed |= completeReceive(line, to);
    return progressed;
  }

  bool startSend(Pipe& line, int from, int to) {
    Rank& sender = at(ranks_, from);
    auto& queue = at(sender.sends, to);
    if (line.send >= 0 || queue.empty() || at(sender.waits_for, queue.front()) > 0) return false;
    line.send = queue.front();
    queue.pop_front();
    begin(sender, line.send);
    const Step& step = at(sender.schedule.steps, line.send);
    line.snapshot.assign(reinterpret_cast<const char*>(step.data), step.bytes);
    line.sent = 0;
    line.frames.push_back(step.bytes);
    return true;
  }

  bool startReceive(Pipe& line, int from, int to) {
    Rank& receiver = at(ranks_, to);
    auto& queue = at(receiver.receives, from);
    if (line.receive >= 0 || line.frames.empty()) return false;
    if (queue.empty()) {
      ADD_FAILURE() << "rank " << to << " expects no more frames from " << from;
      return false;
    }
    if (at(receiver.waits_for, queue.front()) > 0) return false;
    line.receive = queue.front();
    queue.pop_front();
    begin(receiver, line.receive);
    const Step& step = at(receiver.schedule.steps, line.receive);
    EXPECT_EQ(step.bytes, line.frames.front()) << "frame lengths differ";
    line.frames.pop_front();
    line.received.clear();
    if (step.kind == Step::Kind::kRecv) std::memset(step.data, 0xa5, step.bytes);
    return true;
  }

  bool moveBytes(Pipe& line, int from, int to) {
    size_t wanted = 0;
    if (line.receive >= 0) {
      wanted = at(at(ranks_, to).schedule.steps, line.receive).bytes - line.received.size();
    }
    const size_t from_pipe = std::min(wanted, line.bytes.size());
    line.received.append(line.bytes, 0, from_pipe);
    line.bytes.erase(0, from_pipe);
    wanted -= from_pipe;
    if (line.send < 0) return from_pipe > 0;
    const size_t room = capacity_ - std::min(capacity_, line.bytes.size());
    size_t offer = std::min(line.snapshot.size() - line.sent, room + wanted);
    if (offer == 0) return from_pipe > 0;
    if (!chance()) return true;  // it could have moved
    if (offer > 1 && chance()) offer = 1 + random_() % offer;
    // Read from memory now, not from the snapshot: a late change would arrive.
    const Step& step = at(at(ranks_, from).schedule.steps, line.send);
    const auto* data = reinterpret_cast<const char*>(step.data) + line.sent;
    const size_t direct = std::min(offer, wanted);
    line.received.append(data, direct);
    line.bytes.append(data + direct, offer - direct);
    line.sent += offer;
    return true;
  }

  bool completeReceive(Pipe& line, int to) {
    Rank& receiver = at(ranks_, to);
    const Step& step = at(receiver.schedule.steps, line.receive);
    if (line.received.size() != step.bytes) return false;
    if (step.kind == Step::Kind::kRecv) {
      std::memcpy(step.data, line.received.data(), step.bytes);
    } else {
      reduce(step.data, reinterpret_cast<const uint8_t*>(line.received.data()), step.bytes, to);
    }
    finish(receiver, std::exchange(line.receive, -1));
    return true;
  }

  void reduce(uint8_t* into, const uint8_t* from, size_t bytes, int rank) {
    for (size_t i = 0; i < bytes; i += sizeof(T)) {
      T a;
      T b;
      std::memcpy(&a, into + i, sizeof(T));
      std::memcpy(&b, from + i, sizeof(T));
      a = combine(a, b, at(operations_, rank).reduce);
      std::memcpy(into + i, &a, sizeof(T));
    }
  }

  void apply(const Step& step, int rank) {
    if (step.kind == Step::Kind::kCopy) {
      std::memmove(step.data, step.from, step.bytes);
    } else if (step.kind == Step::Kind::kReduce) {
      reduce(step.data, step.from, step.bytes, rank);
    } else if (step.kind == Step::Kind::kScale) {
      T factor;
      std::memcpy(&factor, at(operations_, rank).factor.data(), sizeof(T));
      map(step.data, step.from, step.bytes, [&](T value) { return value * factor; });
    } else {
      map(step.data, step.data, step.bytes,
          [&](T value) { return value / static_cast<T>(worldSize()); });
    }
  }

  template <typename Function>
  static void map(uint8_t* into, const uint8_t* from, size_t bytes, Function function) {
    for (size_t i = 0; i < bytes; i += sizeof(T)) {
      T value;
      std::memcpy(&value, from + i, sizeof(T));
      value = static_cast<T>(function(value));
      std::memcpy(into + i, &value, sizeof(T));
    }
  }

  static bool overlap(const uint8_t* a, const uint8_t* b, size_t a_bytes, size_t b_bytes) {
    return a != nullptr && b != nullptr && a < b + b_bytes && b < a + a_bytes;
  }
  static bool conflict(const Step& a, const Step& b) {
    const bool a_writes = a.kind != Step::Kind::kSend;
    const bool b_writes = b.kind != Step::Kind::kSend;
    return ((a_writes || b_writes) && overlap(a.data, b.data, a.bytes, b.bytes)) ||
           (a_writes && overlap(a.data, b.from, a.bytes, b.bytes)) ||
           (b_writes && overlap(b.data, a.from, b.bytes, a.bytes));
  }

  void begin(Rank& rank, int index) {
    for (const int other : rank.active) {
      EXPECT_FALSE(conflict(at(rank.schedule.steps, index), at(rank.schedule.steps, other)))
          << "steps " << index << " and " << other << " touch the same memory at once";
    }
    rank.active.push_back(index);
  }

  void finish(Rank& rank, int index) {
    rank.active.erase(std::find(rank.active.begin(), rank.active.end(), index));
    --rank.undone;
    for (const int next : at(rank.dependents, index)) {
      if (--at(rank.waits_for, next) > 0) continue;
      if (at(rank.schedule.steps, next).peer < 0) rank.local_ready.push_back(next);
    }
  }

  std::string describeStuck() const {
    std::string text;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      text += "rank " + std::to_string(i) + ": " + std::to_string(ranks_[i].undone) + " undone; ";
    }
    return text;
  }

  const std::vector<Operation> operations_;
  const size_t capacity_;
  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::vector<Pipe> pipes_;  // from * size + to
};

}  // namespace torchft_ext
