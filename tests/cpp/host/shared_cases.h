// Collectives with the values that each rank gives, and those that it must have after it.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "comm/operation.h"

namespace torchft_ext::shared_test {

using Ints = std::vector<int32_t>;

// What one rank has in an operation: inputs and outputs as lists of buffers.
struct Side {
  std::vector<Ints> inputs;
  std::vector<Ints> outputs;
};
using World = std::vector<Side>;

inline int32_t item(int rank, size_t index, int salt = 0) {
  return static_cast<int32_t>((static_cast<size_t>(rank) + 1) * 1000003 + index * 7919 +
                              static_cast<size_t>(salt) * 104729) %
         100000;
}
inline Ints itemsOf(int rank, size_t count, int salt = 0) {
  Ints items(count);
  for (size_t i = 0; i < count; ++i) items[i] = item(rank, i, salt);
  return items;
}

struct Case {
  OpKind kind;
  size_t count;  // items of a buffer; of alltoall and allgather some more or less by rank
  int root = 0;
  ReduceKind reduce = ReduceKind::kSum;
  int salt = 0;  // of the values
};

inline size_t countOf(const Case& one, int from, int to) {
  if (one.kind == OpKind::kAlltoall) {
    return one.count * static_cast<size_t>((from * 3 + to * 5) % 4) / 2;
  }
  if (one.kind == OpKind::kAllgather) return one.count + static_cast<size_t>(from);
  return one.count;
}

// Before and after.
inline std::pair<World, World> makeWorld(const Case& one, int size) {
  World before(static_cast<size_t>(size));
  const auto side = [&](int rank) -> Side& { return before[static_cast<size_t>(rank)]; };
  for (int rank = 0; rank < size; ++rank) {
    const bool is_root = rank == one.root;
    Side& own = side(rank);
    switch (one.kind) {
      case OpKind::kAllreduce:
      case OpKind::kBroadcast:
        own.outputs = {itemsOf(rank, one.count, one.salt)};
        break;
      case OpKind::kAllgather:
        own.inputs = {itemsOf(rank, countOf(one, rank, 0), one.salt)};
        for (int from = 0; from < size; ++from) own.outputs.emplace_back(countOf(one, from, 0));
        break;
      case OpKind::kReduce:
        own.inputs = {itemsOf(rank, one.count, one.salt)};
        if (is_root) own.outputs = {Ints(one.count)};
        break;
      case OpKind::kGather:
        own.inputs = {itemsOf(rank, one.count, one.salt)};
        if (is_root) own.outputs.assign(static_cast<size_t>(size), Ints(one.count));
        break;
      case OpKind::kScatter:
        own.outputs = {Ints(one.count)};
        for (int to = 0; is_root && to < size; ++to) {
          own.inputs.push_back(itemsOf(rank, one.count, one.salt + to));
        }
        break;
      case OpKind::kReduceScatter:
        for (int to = 0; to < size; ++to)
          own.inputs.push_back(itemsOf(rank, one.count, one.salt + to));
        own.outputs = {Ints(one.count)};
        break;
      case OpKind::kAlltoall:
        for (int to = 0; to < size; ++to) {
          own.inputs.push_back(itemsOf(rank, countOf(one, rank, to), one.salt + to));
          own.outputs.emplace_back(countOf(one, to, rank));
        }
        break;
      default:
        break;
    }
  }
  World after = before;
  const auto sumOf = [&](size_t index, int to) {
    const int salt = one.salt + to;
    int32_t sum = one.reduce == ReduceKind::kMax ? INT32_MIN : 0;
    for (int rank = 0; rank < size; ++rank) {
      const int32_t value = item(rank, index, salt);
      sum = one.reduce == ReduceKind::kMax ? std::max(sum, value) : sum + value;
    }
    return one.reduce == ReduceKind::kAvg ? sum / size : sum;
  };
  for (int rank = 0; rank < size; ++rank) {
    Side& own = after[static_cast<size_t>(rank)];
    for (size_t at = 0; at < own.outputs.size(); ++at) {
      const int from = static_cast<int>(at);
      for (size_t i = 0; i < own.outputs[at].size(); ++i) {
        int32_t& value = own.outputs[at][i];
        if (one.kind == OpKind::kAllreduce || one.kind == OpKind::kReduce) value = sumOf(i, 0);
        if (one.kind == OpKind::kBroadcast) value = item(one.root, i, one.salt);
        if (one.kind == OpKind::kAllgather || one.kind == OpKind::kGather)
          value = item(from, i, one.salt);
        if (one.kind == OpKind::kScatter) value = item(one.root, i, one.salt + rank);
        if (one.kind == OpKind::kReduceScatter) value = sumOf(i, rank);
        if (one.kind == OpKind::kAlltoall) value = item(from, i, one.salt + rank);
      }
    }
  }
  return {std::move(before), std::move(after)};
}

inline std::vector<Buffer> buffersOf(std::vector<Ints>& lists) {
  std::vector<Buffer> buffers;
  buffers.reserve(lists.size());
  for (Ints& items : lists) {
    buffers.push_back({reinterpret_cast<uint8_t*>(items.data()), items.size() * sizeof(int32_t)});
  }
  return buffers;
}

inline Operation operationOf(const Case& one, Side& side) {
  Operation operation;
  operation.kind = one.kind;
  operation.dtype = DType::kInt32;
  operation.reduce = one.reduce;
  operation.root = one.root;
  operation.inputs = buffersOf(side.inputs);
  operation.outputs = buffersOf(side.outputs);
  return operation;
}

inline std::string nameOf(const Case& one) {
  return std::string(toString(one.kind)) + " of " + std::to_string(one.count) + ", root " +
         std::to_string(one.root) + ", " + toString(one.reduce);
}

inline const std::vector<OpKind> kKinds = {
    OpKind::kAllreduce,     OpKind::kBroadcast, OpKind::kAllgather,
    OpKind::kReduce,        OpKind::kGather,    OpKind::kScatter,
    OpKind::kReduceScatter, OpKind::kAlltoall,  OpKind::kBarrier};

}  // namespace torchft_ext::shared_test
