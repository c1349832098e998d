// Schedules of the kinds that only move bytes: broadcast, allgather, gather, scatter, alltoall,
// barrier.
#include <algorithm>

#include "host/schedule_builder.h"

namespace torchft_ext {
namespace {

constexpr int kNone = ScheduleBuilder::kNone;

// A binomial tree from the root: few rounds.
void buildBroadcastTree(ScheduleBuilder& builder) {
  const int size = builder.size();
  const int position = builder.neighbour(-builder.operation().root);
  int reach = 1;  // how far this rank's parent is away; of the root: past the last rank
  while (reach < size && (position & reach) == 0) reach *= 2;
  const Buffer whole = builder.operation().outputs[0];
  const Chunking chunks = Chunking::of(whole.bytes, builder.tuning());
  for (size_t c = 0; c < chunks.count; ++c) {
    const Buffer piece = chunks.piece(whole, c);
    const int ready = position == 0 ? kNone : builder.recv(builder.neighbour(-reach), piece);
    for (int distance = reach / 2; distance > 0; distance /= 2) {
      if (position + distance < size) builder.send(builder.neighbour(distance), piece, {ready});
    }
  }
}

// From rank to rank, chunk after chunk: every connection carries each byte once, all at the same
// time.
void buildBroadcastChain(ScheduleBuilder& builder) {
  const int position = builder.neighbour(-builder.operation().root);
  const Buffer whole = builder.operation().outputs[0];
  const Chunking chunks = Chunking::of(whole.bytes, builder.tuning());
  for (size_t c = 0; c < chunks.count; ++c) {
    const Buffer piece = chunks.piece(whole, c);
    const int ready = position == 0 ? kNone : builder.recv(builder.neighbour(-1), piece);
    if (position + 1 < builder.size()) builder.send(builder.neighbour(1), piece, {ready});
  }
}

void buildAllgatherDirect(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  for (int k = 1; k < builder.size(); ++k) builder.send(builder.neighbour(k), operation.inputs[0]);
  for (int k = 1; k < builder.size(); ++k) {
    const int from = builder.neighbour(-k);
    builder.recv(from, operation.outputs[static_cast<size_t>(from)]);
  }
}

void buildAllgatherRing(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  const Chunking chunks = Chunking::of(longestOf(operation.outputs), builder.tuning());
  std::vector<int> ready(chunks.count, kNone);
  for (int round = 0; round + 1 < builder.size(); ++round) {
    const Buffer out = round == 0
                           ? operation.inputs[0]
                           : operation.outputs[static_cast<size_t>(builder.neighbour(-round))];
    const Buffer in = operation.outputs[static_cast<size_t>(builder.neighbour(-round - 1))];
    for (size_t c = 0; c < chunks.count; ++c) {
      builder.send(builder.neighbour(1), chunks.piece(out, c), {ready[c]});
      ready[c] = builder.recv(builder.neighbour(-1), chunks.piece(in, c));
    }
  }
}

// Each round doubles what a rank has: its own part and those of the ranks that follow it (Bruck,
// Ho, Kipnis, Upfal, Weathersby: "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", 1997).
void buildAllgatherDoubling(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  const int size = builder.size();
  const auto part = [&](int distance) {
    return operation.outputs[static_cast<size_t>(builder.neighbour(distance))];
  };
  std::vector<int> ready(static_cast<size_t>(size), kNone);  // by distance
  for (int have = 1; have < size; have *= 2) {
    const int more = std::min(have, size - have);
    for (int k = 0; k < more; ++k) {
      builder.send(builder.neighbour(-have), k == 0 ? operation.inputs[0] : part(k),
                   {ready[static_cast<size_t>(k)]});
    }
    for (int k = have; k < have + more; ++k) {
      ready[static_cast<size_t>(k)] = builder.recv(builder.neighbour(have), part(k));
    }
  }
}

}  // namespace

void buildBroadcast(ScheduleBuilder& builder) {
  const size_t bytes = builder.operation().outputs[0].bytes;
  const ScheduleTuning& tuning = builder.tuning();
  const auto size = static_cast<size_t>(builder.size());
  // A chain pays a hop per rank before its pipeline is full.
  const bool fills_chain = builder.size() <= tuning.direct_world
                               ? bytes > tuning.small_bytes
                               : bytes / size >= tuning.chunk_bytes;
  if (fills_chain) {
    buildBroadcastChain(builder);
  } else {
    buildBroadcastTree(builder);
  }
}

void buildAllgather(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  const size_t longest = longestOf(operation.outputs);
  if (builder.size() <= builder.tuning().direct_world) {
    buildAllgatherDirect(builder);
  } else if (longest <= builder.tuning().small_bytes) {
    buildAllgatherDoubling(builder);
  } else {
    buildAllgatherRing(builder);
  }
  builder.copyInChunks(operation.outputs[static_cast<size_t>(builder.rank())],
                       operation.inputs[0].data);
}

void buildGather(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  if (builder.rank() != operation.root) {
    builder.send(operation.root, operation.inputs[0]);
    return;
  }
  for (int k = 1; k < builder.size(); ++k) {
    const int from = builder.neighbour(k);
    builder.recv(from, operation.outputs[static_cast<size_t>(from)]);
  }
  builder.copyInChunks(operation.outputs[static_cast<size_t>(builder.rank())],
                       operation.inputs[0].data);
}

void buildScatter(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  if (builder.rank() != operation.root) {
    builder.recv(operation.root, operation.outputs[0]);
    return;
  }
  for (int k = 1; k < builder.size(); ++k) {
    const int to = builder.neighbour(k);
    builder.send(to, operation.inputs[static_cast<size_t>(to)]);
  }
  builder.copyInChunks(operation.outputs[0],
                       operation.inputs[static_cast<size_t>(builder.rank())].data);
}

void buildAlltoall(ScheduleBuilder& builder) {
  const Operation& operation = builder.operation();
  for (int k = 1; k < builder.size(); ++k) {
    const int to = builder.neighbour(k);
    builder.send(to, operation.inputs[static_cast<size_t>(to)]);
  }
  for (int k = 1; k < builder.size(); ++k) {
    const int from = builder.neighbour(-k);
    builder.recv(from, operation.outputs[static_cast<size_t>(from)]);
  }
  const auto own = static_cast<size_t>(builder.rank());
  builder.copyInChunks(operation.outputs[own], operation.inputs[own].data);
}

// Dissemination: after round k everyone has heard, directly or not, of the 2^(k+1) - 1 ranks behind
// it.
void buildBarrier(ScheduleBuilder& builder) {
  const Buffer token = builder.scratch(1);
  token.data[0] = 1;
  int heard = kNone;
  for (int distance = 1; distance < builder.size(); distance *= 2) {
    const Buffer theirs = builder.scratch(1);
    const Buffer joined = builder.scratch(1);
    builder.send(builder.neighbour(distance), token, {heard});
    const int received = builder.recv(builder.neighbour(-distance), theirs);
    // One step that stands for all rounds so far: frames of different peers arrive in any order.
    heard = builder.copy(joined, theirs.data, {received, heard});
  }
}

}  // namespace torchft_ext
