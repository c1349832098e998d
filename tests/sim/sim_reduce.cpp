#include "sim_reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "sim_types.h"

namespace torchft_ext::sim {
namespace {

template <class T>
T load(const void* data, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
  return value;
}

// Whether the other one is the greater. NaN is greater and less than all.
template <class T>
bool beats(Wide<T> other, Wide<T> one, bool greater) {
  if constexpr (kWhole<T>) {
    const auto left = static_cast<T>(one);
    const auto right = static_cast<T>(other);
    return greater ? right > left : right < left;
  } else {
    return std::isnan(other) || (greater ? other > one : other < one);
  }
}

template <class T>
Wide<T> folded(Wide<T> total, Wide<T> next, NcclRedOp op) {
  switch (op) {
    case kNcclProd:
      return product(total, next);
    case kNcclMax:
    case kNcclMin:
      return beats<T>(next, total, op == kNcclMax) ? next : total;
    default:
      return sum(total, next);
  }
}

template <class T>
T average(Wide<T> total, size_t ranks) {
  if constexpr (kWhole<T>) return static_cast<T>(static_cast<T>(total) / static_cast<T>(ranks));
  return static_cast<T>(total / static_cast<Wide<T>>(ranks));
}

}  // namespace

void reduceBytes(const std::vector<std::vector<char>>& parts, void* out, size_t count,
                 NcclType type, NcclRedOp op) {
  withType(type, [&](auto kind) {
    using T = decltype(kind);
    for (size_t i = 0; i < count; ++i) {
      auto total = static_cast<Wide<T>>(load<T>(parts.front().data(), i));
      for (size_t rank = 1; rank < parts.size(); ++rank)
        total = folded<T>(total, static_cast<Wide<T>>(load<T>(parts[rank].data(), i)), op);
      static_cast<T*>(out)[i] =
          op == kNcclAvg ? average<T>(total, parts.size()) : static_cast<T>(total);
    }
  });
}

std::vector<char> multiplied(const void* data, size_t count, NcclType type, double factor) {
  std::vector<char> bytes(count * sizeOf(type));
  if (count == 0) return bytes;
  std::memcpy(bytes.data(), data, bytes.size());
  withType(type, [&](auto kind) {
    using T = decltype(kind);
    multiply(reinterpret_cast<T*>(bytes.data()), count, static_cast<T>(factor));
  });
  return bytes;
}

size_t reducedByOneRank(size_t count, NcclType type) {
  if (count == 0) return 0;
  const size_t item = sizeOf(type);
  const size_t in_pack = 16 / item;
  const size_t blocks = std::min<size_t>(32, (count * item + 16383) / 16384);
  const size_t share = (count / blocks + in_pack - 1) / in_pack * in_pack;
  return std::min(count, blocks * share);
}

double numberAt(const void* data, NcclType type) {
  return withType(type,
                  [&](auto kind) { return static_cast<double>(load<decltype(kind)>(data, 0)); });
}

}  // namespace torchft_ext::sim
