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

size_t bytesOf(const std::vector<Buffer>& buffers) {
  size_t bytes = 0;
  for (const Buffer& buffer : buffers) bytes += buffer.bytes;
  return bytes;
}

// bytes: of all its buffers; there are none where it has no side.
Shape shapeOf(const Shape& known, bool has_side, size_t bytes, DType dtype) {
  if (known.dimensions != Shape::kUnknown) return known;
  Shape counted;
  counted.dimensions = 0;
  if (has_side) counted.add(static_cast<int64_t>(bytes / itemSize(dtype)));
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
      dumps_(capacity > 0),
      capacity_(dumps_ ? capacity : kLookBack),
      ring_(zeroed(capacity_)) {}

OperationRecord& OperationRecorder::slot(uint64_t number) const {
  return ring_[number % capacity_];
}

OperationRecord* OperationRecorder::find(uint64_t number) const {
  OperationRecord& record = slot(number);
  return record.number == number ? &record : nullptr;
}

// The number of the oldest of the last so many that the ring has.
uint64_t OperationRecorder::oldest(size_t look_back) const {
  const size_t count = std::min(look_back, capacity_);
  return last_ > count ? last_ - count + 1 : 1;
}

void OperationRecorder::begin(GenerationRecord generation) {
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
                                   Clock::time_point at, uint64_t place) {
  const size_t in = bytesOf(operation.inputs);
  const size_t out = bytesOf(operation.outputs);
  const Shape input =
      shapeOf(operation.input_shape, !operation.inputs.empty(), in, operation.dtype);
  const Shape output =
      shapeOf(operation.output_shape, !operation.outputs.empty(), out, operation.dtype);
  MutexLock lock(mutex_);
  if (counted_ != generation) collectives_ = places_ = 0;
  counted_ = generation;
  if (place != kNoPlace) places_ = place + 1;
  totals_.bytes[static_cast<size_t>(operation.kind)] += std::max(in, out);
  OperationRecord& record = slot(++last_);
  record.number = last_;
  record.generation = generation;
  record.seq = seq;
  record.collective = countedAlike(operation) ? ++collectives_ : 0;
  record.place = place;
  record.kind = operation.kind;
  record.dtype = operation.dtype;
  record.state = OperationRecord::State::kScheduled;
  record.on_device = operation.device != nullptr;
  record.waiters = 0;
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

void OperationRecorder::waitedFor(uint64_t number, const std::vector<int>& ranks) {
  MutexLock lock(mutex_);
  OperationRecord* const record = find(number);
  if (record == nullptr) return;
  const size_t count = std::min(ranks.size(), OperationRecord::kMostWaitedFor);
  std::copy_n(ranks.begin(), count, record->waited_for.begin());
  record->waiters = static_cast<uint8_t>(count);
}

void OperationRecorder::ended(uint64_t number, bool failed, Clock::time_point at) {
  MutexLock lock(mutex_);
  OperationRecord* const record = find(number);
  if (record == nullptr) return;
  totals_.time[static_cast<size_t>(record->kind)] += at - record->issued;
  record->state = failed ? OperationRecord::State::kFailed : OperationRecord::State::kCompleted;
  record->ended = at;
}

OperationRecorder::Issued OperationRecorder::issuedIn(int64_t generation, uint64_t place) const {
  MutexLock lock(mutex_);
  Issued issued;
  if (counted_ != generation) return issued;
  issued.collectives = places_;
  issued.last = slot(last_);
  if (place >= places_) return issued;
  for (uint64_t number = last_; number >= oldest(kLookBack); --number) {
    const OperationRecord& record = slot(number);
    if (record.generation != generation) break;
    if (record.place != place) continue;
    issued.at_place = record;
    break;
  }
  return issued;
}

OperationTotals OperationRecorder::totals() const {
  MutexLock lock(mutex_);
  return totals_;
}

std::string OperationRecorder::waits() const {
  MutexLock lock(mutex_);
  for (uint64_t number = oldest(kLookBack); number <= last_; ++number) {
    const OperationRecord& record = slot(number);
    const bool under_way = record.state == OperationRecord::State::kScheduled ||
                           record.state == OperationRecord::State::kStarted;
    if (under_way && record.waiters > 0 && !generations_.empty() &&
        record.generation == generations_.back().number)
      return describe(record, generations_.back());
  }
  return "";
}

std::string OperationRecorder::describe(const OperationRecord& waiting,
                                        const GenerationRecord& generation) const {
  std::string text = toString(waiting.kind);
  if (waiting.seq >= 0) text += " #" + std::to_string(waiting.seq);
  text +=
      " on '" + group_ + "' has waited " +
      formatSeconds(std::chrono::floor<std::chrono::milliseconds>(Clock::now() - waiting.issued)) +
      " for ";
  for (size_t i = 0; i < waiting.waiters; ++i) {
    const auto rank = static_cast<size_t>(waiting.waited_for[i]);
    text += (i == 0 ? "rank " : ", rank ") + std::to_string(rank);
    if (rank >= generation.members.size()) continue;
    const GenerationRecord::Member& member = generation.members[rank];
    text += " (host " + member.host + ", pid " + std::to_string(member.pid) + ")";
  }
  return text;
}

OperationRecorder::Snapshot OperationRecorder::snapshotLocked(
    const GenerationRecord& generation) const {
  Snapshot snapshot{group_, generation, {}};
  for (uint64_t number = oldest(capacity_); number <= last_; ++number) {
    const OperationRecord& record = slot(number);
    if (record.generation == generation.number) snapshot.operations.push_back(record);
  }
  return snapshot;
}

std::optional<OperationRecorder::Snapshot> OperationRecorder::snapshotOf(int64_t generation) const {
  if (!dumps_) return std::nullopt;
  MutexLock lock(mutex_);
  for (const GenerationRecord& known : generations_)
    if (known.number == generation) return snapshotLocked(known);
  return std::nullopt;
}

std::vector<OperationRecorder::Snapshot> OperationRecorder::snapshots() const {
  std::vector<Snapshot> all;
  if (!dumps_) return all;
  MutexLock lock(mutex_);
  all.reserve(generations_.size());
  for (const GenerationRecord& known : generations_) all.push_back(snapshotLocked(known));
  return all;
}

}  // namespace torchft_ext
