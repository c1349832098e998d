#include "host/shared_execution.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "host/reduce.h"
#include "host/schedule.h"

namespace torchft_ext {
namespace {

constexpr size_t kBlock = 4096;                // of a reduction: stays in the first cache
constexpr size_t kCacheLine = 64;              // moved at least: has whole items
constexpr size_t kCopied = size_t{128} << 10;  // between two looks at the budget

uint64_t mix(uint64_t value) {
  value ^= value >> 32;
  value *= 0xd6e8feb86659fd93U;
  value ^= value >> 29;
  return value;
}

uint8_t* behind(uint8_t* data, size_t bytes) {
  return data == nullptr ? nullptr : data + bytes;
}

void advance(SharedPart& part, size_t bytes) {
  part.offset += bytes;
  part.user = behind(part.user, bytes);
}

}  // namespace

void SharedExecution::begin(const Operation& operation) {
  operation_ = &operation;
  mark_.number = number_;
  mark_.history = history_;
  mark_.signature = signatureOf(operation);
  program_.emplace(operation, rank_, size_, board_.slotBytes(), plans_, position_);
  instructions_.clear();
  next_ = 0;
}

SharedExecution::State SharedExecution::run(size_t* budget, size_t instructions) {
  while (true) {
    for (; next_ < instructions_.size(); ++next_) {
      if (instructions-- == 0) return State::kTurn;
      if (!carryOut(instructions_[next_], budget)) return state_;
    }
    instructions_.clear();
    next_ = 0;
    if (!program_->next(&instructions_)) break;
  }
  finish();
  return State::kDone;
}

void SharedExecution::finish() {
  position_ = program_->position();
  if (const auto plan = program_->plan())
    use_->by_plan[static_cast<size_t>(*plan)].fetch_add(1, std::memory_order_relaxed);
  program_.reset();
  ++number_;
  history_ = mix(history_ ^ mark_.signature) + number_;
}

bool SharedExecution::mayGoOn() {
  return next_ >= instructions_.size() || awaits(instructions_[next_]);
}

// False: it waits, or cannot be carried out, as state_ says.
bool SharedExecution::carryOut(SharedInstruction& instruction, size_t* budget) {
  switch (instruction.kind) {
    case Kind::kAwaitFree:
    case Kind::kAwait:
      state_ = State::kWaits;
      if (!awaits(instruction)) return false;
      return instruction.kind == Kind::kAwaitFree || agrees(instruction);
    case Kind::kPublish:
      mark_.bytes = instruction.bytes;
      board_.publish(instruction.step, mark_);
      return true;
    case Kind::kDone:
      board_.setDone(instruction.step);
      board_.tellDone();
      return true;
    case Kind::kLearn:
      return learn(instruction);
    case Kind::kCopy:
    case Kind::kScale:
    case Kind::kReduce:
      return moveSome(instruction, budget);
  }
  return true;
}

// True: what it waits for is so.
bool SharedExecution::awaits(const SharedInstruction& instruction) {
  if (instruction.kind == Kind::kAwaitFree) return allAreDone(instruction.step);
  if (instruction.kind != Kind::kAwait) return true;
  peer_ = instruction.peer;
  return board_.published(instruction.peer, instruction.step) != SharedBoard::Published::kNotYet;
}

bool SharedExecution::allAreDone(uint64_t step) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || board_.hasDone(peer, step)) continue;
    peer_ = peer;
    return false;
  }
  return true;
}

bool SharedExecution::agrees(const SharedInstruction& instruction) {
  const SharedOperationMark theirs = board_.markOf(instruction.peer, instruction.step);
  SharedOperationMark ours = mark_;
  ours.bytes = instruction.bytes;
  const bool in_time =
      board_.published(instruction.peer, instruction.step) == SharedBoard::Published::kYes;
  if (theirs == ours && in_time) return true;
  mismatch(theirs, ours);
  return false;
}

void SharedExecution::mismatch(const SharedOperationMark& theirs, const SharedOperationMark& ours) {
  state_ = State::kMismatch;
  const std::string place = " as collective " + std::to_string(ours.number) + " of the generation";
  if (theirs.number != ours.number) {
    how_ = "it issued " + describeSignature(theirs.signature) + " as collective " +
           std::to_string(theirs.number) + " of the generation, where rank " +
           std::to_string(rank_) + " issued " + describeSignature(ours.signature) + place;
  } else if (theirs.signature != ours.signature) {
    how_ = describeDifference(theirs.signature, ours.signature, ours.number, rank_);
  } else if (theirs.history != ours.history) {
    how_ = "it issued other operations than rank " + std::to_string(rank_) + " before " +
           describeSignature(ours.signature) + place;
  } else {
    how_ = "it sent " + std::to_string(theirs.bytes) + " bytes in " +
           describeSignature(ours.signature) + ", where rank " + std::to_string(rank_) +
           " expects " + std::to_string(ours.bytes) + " bytes";
  }
}

bool SharedExecution::learn(const SharedInstruction& instruction) {
  std::vector<uint64_t> row(static_cast<size_t>(size_));
  std::memcpy(row.data(), readable(instruction.from, instruction.peer),
              row.size() * sizeof(uint64_t));
  how_ = program_->learn(instruction.peer, row.data());
  peer_ = instruction.peer;
  state_ = State::kMismatch;
  return how_.empty();
}

// ---------------------------------------------------------------- data

bool SharedExecution::moveSome(SharedInstruction& instruction, size_t* budget) {
  if (instruction.to.in == SharedPart::In::kSlot || instruction.also.in == SharedPart::In::kSlot) {
    state_ = State::kNoMemory;
    if (!board_.prepareSlots()) return false;
  }
  while (instruction.bytes > 0) {
    state_ = State::kTurn;
    if (*budget == 0) return false;
    const size_t most = instruction.kind == Kind::kReduce ? kBlock : kCopied;
    const size_t allowed = std::max(*budget / kCacheLine, size_t{1}) * kCacheLine;
    const size_t bytes = std::min({instruction.bytes, most, allowed});
    uint8_t* to = writable(instruction.to);
    if (instruction.kind == Kind::kCopy) {
      std::memcpy(to, readable(instruction.from, instruction.from.rank), bytes);
    } else if (instruction.kind == Kind::kScale) {
      multiplyInto(to, readable(instruction.from, instruction.from.rank), bytes, operation_->dtype,
                   operation_->factor.data());
    } else {
      reduceSome(instruction, bytes);
    }
    count(instruction, bytes);
    *budget -= std::min(*budget, bytes);
    instruction.bytes -= bytes;
    advance(instruction.from, bytes);
    advance(instruction.to, bytes);
    advance(instruction.also, bytes);
    if (instruction.own != nullptr) instruction.own += bytes;
  }
  return true;
}

void SharedExecution::count(const SharedInstruction& instruction, size_t bytes) {
  const auto is_shared = [](const SharedPart& part) { return part.in != SharedPart::In::kUser; };
  if (is_shared(instruction.to) || is_shared(instruction.also)) written_ += bytes;
  if (is_shared(instruction.from))
    read_ += instruction.kind == Kind::kReduce ? bytes * static_cast<size_t>(size_ - 1) : bytes;
}

// Reduces in the order of ranks. The destination may be this rank's own part.
void SharedExecution::reduceSome(const SharedInstruction& instruction, size_t bytes) {
  alignas(64) std::array<uint8_t, kBlock> block;
  uint8_t* to = writable(instruction.to);
  const bool is_once = instruction.also.in == SharedPart::In::kUser;
  // Rank 1 may begin with its own part, unless others reduce the same: of two NaN the first one
  // stays.
  const bool in_place = instruction.own == to && (rank_ == 0 || (rank_ == 1 && !is_once));
  uint8_t* sum = in_place ? to : block.data();
  const int first = in_place ? rank_ : 0;
  const auto partOf = [&](int rank) {
    return rank == rank_ && instruction.own != nullptr ? instruction.own
                                                       : readable(instruction.from, rank);
  };
  if (!in_place) std::memcpy(sum, partOf(first), bytes);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == first) continue;
    reduceInto(sum, partOf(rank), bytes, operation_->dtype, operation_->reduce);
  }
  if (operation_->reduce == ReduceKind::kAvg) divideBy(sum, bytes, operation_->dtype, size_);
  if (!in_place) std::memcpy(to, sum, bytes);
  if (!is_once) std::memcpy(writable(instruction.also), sum, bytes);
}

// The user's, or an own one.
uint8_t* SharedExecution::writable(const SharedPart& part) {
  switch (part.in) {
    case SharedPart::In::kLine:
      return board_.ownPayload(part.at) + part.offset;
    case SharedPart::In::kSlot:
      return board_.ownSlot(part.at) + part.offset;
    case SharedPart::In::kUser:
      break;
  }
  return part.user;
}

const uint8_t* SharedExecution::readable(const SharedPart& part, int rank) const {
  switch (part.in) {
    case SharedPart::In::kLine:
      return board_.payloadOf(rank, part.at) + part.offset;
    case SharedPart::In::kSlot:
      return board_.slotOf(rank, part.at) + part.offset;
    case SharedPart::In::kUser:
      break;
  }
  return part.user;
}

}  // namespace torchft_ext
