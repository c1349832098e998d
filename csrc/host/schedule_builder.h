// Assembles a schedule step by step; internal to the schedule files.
//
// Every step function returns the new step's index, or kNone when there is nothing to do (no
// bytes): kNone in an `after` list means "nothing to wait for".
//
// Why the schedules cannot deadlock, however little the connections buffer: let a send and its
// receive be one event. Each algorithm has an order of its events (by chunk, then by round) in
// which every event follows those it waits for, on both sides, list order of the pair included. So
// the first event that has not happened can always happen. A receive therefore never waits for a
// send of the same rank to the same peer of the same round: two ranks that exchange a region in
// place would wait for each other.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "host/schedule.h"

namespace torchft_ext {

class ScheduleBuilder {
 public:
  static constexpr int kNone = -1;
  using After = std::initializer_list<int>;  // at most 3 that are not kNone

  ScheduleBuilder(const Operation& operation, int rank, int size, const ScheduleTuning& tuning)
      : operation_(operation), tuning_(tuning), rank_(rank), size_(size) {}

  const Operation& operation() const { return operation_; }
  const ScheduleTuning& tuning() const { return tuning_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  // The rank that is `distance` (between -size and size) further round the circle.
  int neighbour(int distance) const { return (rank_ + distance + size_) % size_; }

  int send(int peer, Buffer data, After after = {});
  int recv(int peer, Buffer data, After after = {});
  int recvReduce(int peer, Buffer data, After after = {});
  // All `bytes` of data; nothing when both are the same memory.
  int copy(Buffer data, const uint8_t* from, After after = {});
  int reduce(Buffer data, const uint8_t* from, After after = {});
  // Nothing unless the operation averages.
  int averageIfAsked(Buffer data, After after = {});
  // data = from * factor, in chunks. Every step made afterwards waits for it.
  void scaleFirst(Buffer data, const uint8_t* from);
  // A copy of any length as steps of one chunk each, so that a long one does not hold up the loop.
  void copyInChunks(Buffer data, const uint8_t* from);

  Buffer scratch(size_t bytes);  // uninitialised, lives as long as the schedule
  Schedule take() { return std::move(schedule_); }

 private:
  int push(Step step, After after);

  const Operation& operation_;
  const ScheduleTuning& tuning_;
  const int rank_;
  const int size_;
  Schedule schedule_;
  int begins_after_ = kNone;  // what steps wait for that wait for nothing else
};

// Contiguous parts of nearly equal size; boundaries on whole items, and on cache lines where the
// parts are big.
std::vector<Buffer> splitEvenly(Buffer whole, int parts, size_t item_bytes);

size_t longestOf(const std::vector<Buffer>& buffers);  // bytes

// The pieces of a pipeline. Equal on all ranks for equal arguments.
struct Chunking {
  size_t chunk = 1;
  size_t count = 0;

  // For buffers of which `longest_bytes` is the longest.
  static Chunking of(size_t longest_bytes, const ScheduleTuning& tuning);
  Buffer piece(Buffer whole, size_t index) const;  // no bytes past the end
};

// One function for each kind; size() is at least 2.
// This rank's contribution times the factor: in place where it may be written, else in scratch.
// What the kind's function builds then is the sum.
void scaleContribution(ScheduleBuilder& builder, Operation& operation);
void buildAllreduce(ScheduleBuilder& builder);
void buildReduceScatter(ScheduleBuilder& builder);
void buildReduce(ScheduleBuilder& builder);
void buildBroadcast(ScheduleBuilder& builder);
void buildAllgather(ScheduleBuilder& builder);
void buildGather(ScheduleBuilder& builder);
void buildScatter(ScheduleBuilder& builder);
void buildAlltoall(ScheduleBuilder& builder);
void buildBarrier(ScheduleBuilder& builder);

}  // namespace torchft_ext
