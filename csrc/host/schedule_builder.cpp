#include "host/schedule_builder.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace torchft_ext {
namespace {

constexpr size_t kCacheLine = 64;  // a multiple of every item size

}  // namespace

int ScheduleBuilder::push(Step step, After after) {
  if (step.bytes == 0) return kNone;
  size_t used = 0;
  for (const int index : after) {
    if (index == kNone) continue;
    assert(used < step.after.size());
    step.after[used++] = index;
  }
  if (used == 0) step.after[0] = begins_after_;
  schedule_.steps.push_back(step);
  return static_cast<int>(schedule_.steps.size()) - 1;
}

int ScheduleBuilder::send(int peer, Buffer data, After after) {
  return push({.kind = Step::Kind::kSend, .peer = peer, .data = data.data, .bytes = data.bytes},
              after);
}

int ScheduleBuilder::recv(int peer, Buffer data, After after) {
  return push({.kind = Step::Kind::kRecv, .peer = peer, .data = data.data, .bytes = data.bytes},
              after);
}

int ScheduleBuilder::recvReduce(int peer, Buffer data, After after) {
  return push(
      {.kind = Step::Kind::kRecvReduce, .peer = peer, .data = data.data, .bytes = data.bytes},
      after);
}

int ScheduleBuilder::copy(Buffer data, const uint8_t* from, After after) {
  if (data.data == from) return kNone;
  return push({.kind = Step::Kind::kCopy, .data = data.data, .from = from, .bytes = data.bytes},
              after);
}

int ScheduleBuilder::reduce(Buffer data, const uint8_t* from, After after) {
  return push({.kind = Step::Kind::kReduce, .data = data.data, .from = from, .bytes = data.bytes},
              after);
}

int ScheduleBuilder::averageIfAsked(Buffer data, After after) {
  if (operation_.reduce != ReduceKind::kAvg) {
    assert(after.size() <= 1);
    return after.size() == 0 ? kNone : *after.begin();
  }
  return push({.kind = Step::Kind::kAverage, .data = data.data, .bytes = data.bytes}, after);
}

void ScheduleBuilder::scaleFirst(Buffer data, const uint8_t* from) {
  const Chunking chunks = Chunking::of(data.bytes, tuning_);
  for (size_t i = 0; i < chunks.count; ++i) {
    const Buffer piece = chunks.piece(data, i);
    begins_after_ = push({.kind = Step::Kind::kScale,
                          .data = piece.data,
                          .from = from + i * chunks.chunk,
                          .bytes = piece.bytes},
                         {});
  }
}

void ScheduleBuilder::copyInChunks(Buffer data, const uint8_t* from) {
  const Chunking chunks = Chunking::of(data.bytes, tuning_);
  for (size_t i = 0; i < chunks.count; ++i) {
    copy(chunks.piece(data, i), from + i * chunks.chunk);
  }
}

Buffer ScheduleBuilder::scratch(size_t bytes) {
  // new[] without () leaves the bytes uninitialised: they are always written before they are read.
  schedule_.scratch.emplace_back(new uint8_t[std::max<size_t>(bytes, 1)]);
  return {schedule_.scratch.back().get(), bytes};
}

std::vector<Buffer> splitEvenly(Buffer whole, int parts, size_t item_bytes) {
  const auto count = static_cast<size_t>(parts);
  const size_t unit = whole.bytes >= 16 * kCacheLine * count ? kCacheLine : item_bytes;
  const size_t units = (whole.bytes + unit - 1) / unit;
  std::vector<Buffer> slices(count);
  size_t begin = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t units_before = units / count * (i + 1) + units % count * (i + 1) / count;
    const size_t end = std::min(units_before * unit, whole.bytes);
    slices[i] = {whole.data + begin, end - begin};
    begin = end;
  }
  return slices;
}

size_t longestOf(const std::vector<Buffer>& buffers) {
  size_t longest = 0;
  for (const Buffer& buffer : buffers) longest = std::max(longest, buffer.bytes);
  return longest;
}

Chunking Chunking::of(size_t longest_bytes, const ScheduleTuning& tuning) {
  // A buffer of few chunks is cut finer, or nothing of it would overlap.
  constexpr size_t kFinest = 64UL * 1024;
  const size_t wanted =
      std::clamp(longest_bytes / 4, std::min(kFinest, tuning.chunk_bytes), tuning.chunk_bytes);
  Chunking chunks;
  chunks.chunk = std::max(wanted / kCacheLine * kCacheLine, kCacheLine);
  chunks.count = (longest_bytes + chunks.chunk - 1) / chunks.chunk;
  return chunks;
}

Buffer Chunking::piece(Buffer whole, size_t index) const {
  const size_t begin = index * chunk;
  if (begin >= whole.bytes) return {whole.data, 0};
  return {whole.data + begin, std::min(chunk, whole.bytes - begin)};
}

}  // namespace torchft_ext
