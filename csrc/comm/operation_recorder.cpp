#include "comm/operation_recorder.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace torchft_ext {
namespace {

constexpr const char* kCapacityVariable = "TORCH_FR_BUFFER_SIZE";

OperationRecord* zeroed(size_t capacity) {
  return static_cast<OperationRecord*>(std::calloc(capacity, sizeof(OperationRecord)));
}

int64_t itemsOf(const std::vector<Buffer>& buffers, DType dtype) {
  size_t bytes = 0;
  for (const Buffer& buffer : buffers) bytes += buffer.bytes;
  return static_cast<int64_t>(bytes / itemSize(dtype));
}

Shape shapeOf(const Shape& known, const std::vector<Buffer>& buffers, DType dtype) {
  if (known.dimensions != Shape::kUnknown) return known;
  Shape counted;
  counted.dimensions = 0;
  if (!buffers.empty()) counted.add(itemsOf(buffers, dtype));
  return counted;
}

// What callbacks issue has a name in place of a number that all ranks know.
bool countedAlike(const Operation& operation) {
  return isCollective(operation.kind) && operation.name == 0 && !operation.in_nameless_callback;
}

}  // namespace

size_t OperationRecorder::capacityFromEnvironment() {
  const char* const text = std::getenv(kCapacityVariable);  // nothing here calls setenv
  if (text == nullptr || *text == '\0') return kUsualCapacity;
  size_t capacity = 0;
  const char* const end = text + std::strlen(text);
  const auto [stopped, error] = std::from_chars(text, end, capacity);
  if (error == std::errc() && stopped == end) return std::min(capacity, kMostCapacity);
  static const bool told = [text] {
    log(LogLevel::kWarning, std::string(kCapacityVariable) + ": expected a number of operations " +
                                "(0: none are recorded), found '" + text + "'; it is taken as " +
                                std::to_string(kUsualCapacity));
    return true;
  }();
  static_cast<void>(told);
  return kUsualCapacity;
}

OperationRecorder::OperationRecorder(std::string group, size_t capacity)
    : group_(std::move(group)),
      capacity_(capacity),
      ring_(capacity == 0 ? nullptr : zeroed(capacity)) {}

OperationRecord& OperationRecorder::slot(uint64_t number) const {
  return ring_[number % capacity_];
}

OperationRecord* OperationRecorder::find(uint64_t number) const {
  OperationRecord& record = slot(number);
  return record.number == number ? &record : nullptr;
}

void OperationRecorder::begin(GenerationRecord generation) {
  if (!on()) return;
  MutexLock lock(mutex_);
  if (!first_rank_) first_rank_ = generation.rank;
  generation.first_rank = *first_rank_;
  generations_.push_back(std::move(generation));
  if (generations_.size() > kGenerationsKept) generations_.pop_front();
}

void OperationRecorder::failed(int64_t generation, FailurePtr failure) {
  MutexLock lock(mutex_);
  for (GenerationRecord& known : generations_)
    if (known.number == generation) known.failure = failure;
}

uint64_t OperationRecorder::issued(const Operation& operation, int64_t generation, int64_t seq,
                                   Clock::time_point at) {
  const Shape input = shapeOf(operation.input_shape, operation.inputs, operation.dtype);
  const Shape output = shapeOf(operation.output_shape, operation.outputs, operation.dtype);
  MutexLock lock(mutex_);
  if (counted_ != generation) collectives_ = 0;
  counted_ = generation;
  OperationRecord& record = slot(++last_);
  record.number = last_;
  record.generation = generation;
  record.seq = seq;
  record.collective = countedAlike(operation) ? ++collectives_ : 0;
  record.kind = operation.kind;
  record.dtype = operation.dtype;
  record.state = OperationRecord::State::kScheduled;
  record.on_device = operation.device != nullptr;
  record.root = operation.root;
  record.peer = operation.peer;
  record.input = input;
  record.output = output;
  record.issued = at;
  record.started = record.ended = Clock::time_point();
  return last_;
}

void OperationRecorder::started(uint64_t number, Clock::time_point at) {
  MutexLock lock(mutex_);
  OperationRecord* const record = find(number);
  if (record == nullptr || record->state != OperationRecord::State::kScheduled) return;
  record->state = OperationRecord::State::kStarted;
  record->started = at;
}

void OperationRecorder::ended(uint64_t number, bool failed, Clock::time_point at) {
  MutexLock lock(mutex_);
  OperationRecord* const record = find(number);
  if (record == nullptr) return;
  record->state = failed ? OperationRecord::State::kFailed : OperationRecord::State::kCompleted;
  record->ended = at;
}

OperationRecorder::Snapshot OperationRecorder::snapshotLocked(
    const GenerationRecord& generation) const {
  Snapshot snapshot{group_, generation, {}};
  const uint64_t first = last_ > capacity_ ? last_ - capacity_ + 1 : 1;
  for (uint64_t number = first; number <= last_; ++number) {
    const OperationRecord& record = slot(number);
    if (record.generation == generation.number) snapshot.operations.push_back(record);
  }
  return snapshot;
}

std::optional<OperationRecorder::Snapshot> OperationRecorder::snapshotOf(int64_t generation) const {
  MutexLock lock(mutex_);
  for (const GenerationRecord& known : generations_)
    if (known.number == generation) return snapshotLocked(known);
  return std::nullopt;
}

std::vector<OperationRecorder::Snapshot> OperationRecorder::snapshots() const {
  MutexLock lock(mutex_);
  std::vector<Snapshot> all;
  all.reserve(generations_.size());
  for (const GenerationRecord& known : generations_) all.push_back(snapshotLocked(known));
  return all;
}

}  // namespace torchft_ext
