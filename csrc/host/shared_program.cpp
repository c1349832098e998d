#include "host/shared_program.h"

#include <algorithm>
#include <stdexcept>

namespace torchft_ext {
namespace {

constexpr size_t kCacheLine = 64;

size_t longestOf(const std::vector<Buffer>& buffers) {
  size_t longest = 0;
  for (const Buffer& one : buffers) longest = std::max(longest, one.bytes);
  return longest;
}

uint64_t roundsOf(size_t bytes, size_t in_a_round) {
  return std::max<uint64_t>(1, (bytes + in_a_round - 1) / in_a_round);
}

// A rank's slice of a chunk: the first ones are of whole cache lines.
struct Slice {
  size_t begin;
  size_t end;
};
Slice sliceOf(size_t bytes, int rank, int size) {
  const size_t lines = bytes / kCacheLine / static_cast<size_t>(size);
  const size_t begin = lines * kCacheLine * static_cast<size_t>(rank);
  const size_t end = rank == size - 1 ? bytes : begin + lines * kCacheLine;
  return {begin, end};
}

}  // namespace

SharedProgram::SharedProgram(const Operation& operation, int rank, int size, size_t slot_bytes,
                             const SharedPlans& plans, SharedPosition begin)
    : operation_(operation),
      rank_(rank),
      size_(size),
      slot_bytes_(slot_bytes),
      scales_(operation.reduce == ReduceKind::kPreMulSum &&
              (operation.kind == OpKind::kAllreduce || operation.kind == OpKind::kReduce ||
               operation.kind == OpKind::kReduceScatter)),
      position_(begin) {
  planRounds(plans);
}

void SharedProgram::choose(const SharedPlans& plans, size_t bytes) {
  const SharedPlanRow& row = plans.of(operation_.kind, bytes);
  plan_ = row.plan;
  in_ = row.plan == SharedPlan::kLine ? In::kLine : In::kSlot;
  chunk_bytes_ = row.chunk_bytes == 0 ? slot_bytes_ : std::min(row.chunk_bytes, slot_bytes_);
}

void SharedProgram::planRounds(const SharedPlans& plans) {
  size_t longest = 0;
  const auto ranks = static_cast<size_t>(size_);
  switch (operation_.kind) {
    case OpKind::kBarrier:
      rounds_ = 1;
      return;
    case OpKind::kAllreduce:
    case OpKind::kBroadcast:
    case OpKind::kAllgather:
    case OpKind::kSparseAllreduce:
      longest = longestOf(operation_.outputs);
      break;
    case OpKind::kReduce:
    case OpKind::kGather:
      longest = longestOf(operation_.inputs);
      break;
    case OpKind::kScatter:
    case OpKind::kReduceScatter:
      longest =
          longestOf(operation_.kind == OpKind::kScatter ? operation_.outputs : operation_.inputs);
      choose(plans, longest * ranks);
      return planParts(longest);
    case OpKind::kAlltoall:
      choose(plans, kAnySize);
      for (const Buffer& piece : operation_.inputs) row_.push_back(piece.bytes);
      part_bytes_ = (chunk_bytes_ - rowBytes()) / ranks / kCacheLine * kCacheLine;
      round_bytes_ = part_bytes_;
      rounds_ = 1;  // more, once the sizes are known
      return;
    case OpKind::kSend:
    case OpKind::kRecv:
      throw std::logic_error("a send or recv over shared memory");
  }
  choose(plans, longest);
  round_bytes_ = in_ == In::kLine ? kSharedPayloadBytes : chunk_bytes_;
  rounds_ = plan_ == SharedPlan::kOnce ? 1 : roundsOf(longest, round_bytes_);
}

// Of what has a part for each rank.
void SharedProgram::planParts(size_t longest) {
  part_bytes_ = in_ == In::kLine
                    ? longest
                    : chunk_bytes_ / static_cast<size_t>(size_) / kCacheLine * kCacheLine;
  round_bytes_ = std::max<size_t>(part_bytes_, 1);
  rounds_ = roundsOf(longest, round_bytes_);
}

size_t SharedProgram::bytesOfRound(size_t all) const {
  return all <= offset_ ? 0 : std::min(all - offset_, round_bytes_);
}

bool SharedProgram::next(std::vector<SharedInstruction>* out) {
  if (operation_.kind == OpKind::kAlltoall && round_ == 1) {
    rounds_ = roundsOf(longest_learnt_, round_bytes_);
  }
  if (round_ == rounds_) return false;
  out_ = out;
  offset_ = static_cast<size_t>(round_) * round_bytes_;
  emitRound();
  ++round_;
  return true;
}

void SharedProgram::emitRound() {
  switch (operation_.kind) {
    case OpKind::kBarrier:
      beginStep(false);
      publish(0);
      awaitAll(0);
      return done();
    case OpKind::kAllreduce:
      return plan_ == SharedPlan::kSlices ? allreduceChunk() : allreduceOnce();
    case OpKind::kBroadcast:
      return broadcast();
    case OpKind::kAllgather:
    case OpKind::kSparseAllreduce:
      return allgather();
    case OpKind::kReduce:
      return reduce();
    case OpKind::kGather:
      return gather();
    case OpKind::kScatter:
      return scatter();
    case OpKind::kReduceScatter:
      return reduceScatter();
    case OpKind::kAlltoall:
      return alltoall();
    case OpKind::kSend:
    case OpKind::kRecv:
      return;
  }
}

// ---------------------------------------------------------------- plans

void SharedProgram::allreduceOnce() {
  const Buffer data = operation_.outputs.front();
  beginStep(true);
  contribute(data.data, data.bytes, 0);
  publish(data.bytes);
  awaitAll(data.bytes);
  reduceOut(data.data, data.data, data.bytes, 0);
  done();
}

// Round k: chunk k + 1 is copied in; of chunk k the own slice is reduced, into the own slot as
// well; the others' slices of chunk k - 1 are copied out. Nobody reads what lies in the own slice's
// place before it is reduced.
void SharedProgram::allreduceChunk() {
  if (round_ == 0) {
    first_chunk_ = position_.chunk;
    copyChunkIn(0);
  }
  if (round_ + 1 < rounds_) copyChunkIn(static_cast<size_t>(round_) + 1);
  reduceChunk(static_cast<size_t>(round_));
  if (round_ > 0) copyChunkOut(static_cast<size_t>(round_) - 1);
  if (round_ + 1 == rounds_) copyChunkOut(static_cast<size_t>(round_));
}

void SharedProgram::copyChunkIn(size_t chunk) {
  const Buffer data = operation_.outputs.front();
  const size_t offset = chunk * chunk_bytes_;
  const size_t bytes = std::min(chunk_bytes_, data.bytes - offset);
  const Slice own = sliceOf(bytes, rank_, size_);
  beginStep(true);
  in_step_[chunk % 2] = step_;
  uint8_t* from = data.data + offset;
  if (scales_) {
    contribute(from, bytes, 0);
  } else {
    contribute(from, own.begin, 0);
    contribute(from + own.end, bytes - own.end, own.end);
  }
  publish(bytes);
}

void SharedProgram::reduceChunk(size_t chunk) {
  const Buffer data = operation_.outputs.front();
  const size_t offset = chunk * chunk_bytes_;
  const size_t bytes = std::min(chunk_bytes_, data.bytes - offset);
  const Slice own = sliceOf(bytes, rank_, size_);
  step_ = in_step_[chunk % 2];
  chunk_ = first_chunk_ + chunk;
  awaitAll(bytes);
  if (own.end > own.begin) {
    reduceOut(data.data + offset + own.begin, data.data + offset + own.begin, own.end - own.begin,
              own.begin);
    out_->back().also = here(own.begin);
  }
  done();
  step_ = ++position_.step;
  reduced_step_[chunk % 2] = step_;
  free_by_ = freeLineBy();
  publish(bytes);
}

void SharedProgram::copyChunkOut(size_t chunk) {
  const Buffer data = operation_.outputs.front();
  const size_t offset = chunk * chunk_bytes_;
  const size_t bytes = std::min(chunk_bytes_, data.bytes - offset);
  step_ = reduced_step_[chunk % 2];
  chunk_ = first_chunk_ + chunk;
  awaitAll(bytes);
  for (int distance = 1; distance < size_; ++distance) {
    const int peer = (rank_ + distance) % size_;
    const Slice theirs = sliceOf(bytes, peer, size_);
    copyOut(peer, data.data + offset + theirs.begin, theirs.end - theirs.begin, theirs.begin);
  }
  position_.read_by[chunk_ % kSharedSlots] = step_;
  done();
}

void SharedProgram::broadcast() {
  const Buffer data = operation_.outputs.front();
  const size_t bytes = bytesOfRound(data.bytes);
  beginStep(true);
  if (rank_ == operation_.root) {
    contribute(at(data.data), bytes, 0);
    publish(bytes);
  } else {
    await(operation_.root, bytes);
    copyOut(operation_.root, at(data.data), bytes, 0);
  }
  done();
}

void SharedProgram::allgather() {
  const Buffer own = operation_.inputs.front();
  const size_t bytes = bytesOfRound(own.bytes);
  beginStep(true);
  contribute(at(own.data), bytes, 0);
  publish(bytes);
  const auto output = [this](int rank) { return operation_.outputs[static_cast<size_t>(rank)]; };
  copyOwn(at(own.data), at(output(rank_).data), bytes);
  for (int distance = 1; distance < size_; ++distance) {
    const int peer = (rank_ + distance) % size_;
    await(peer, bytesOfRound(output(peer).bytes));
    copyOut(peer, at(output(peer).data), bytesOfRound(output(peer).bytes), 0);
  }
  done();
}

void SharedProgram::reduce() {
  const Buffer own = operation_.inputs.front();
  const size_t bytes = bytesOfRound(own.bytes);
  beginStep(true);
  if (rank_ == operation_.root) {
    if (scales_) contribute(at(own.data), bytes, 0);
    awaitAll(bytes);
    reduceOut(at(own.data), at(operation_.outputs.front().data), bytes, 0);
  } else {
    contribute(at(own.data), bytes, 0);
    publish(bytes);
  }
  done();
}

void SharedProgram::gather() {
  const Buffer own = operation_.inputs.front();
  const size_t bytes = bytesOfRound(own.bytes);
  beginStep(true);
  if (rank_ != operation_.root) {
    contribute(at(own.data), bytes, 0);
    publish(own.bytes);
    return done();
  }
  for (int rank = 0; rank < size_; ++rank) {
    const Buffer output = operation_.outputs[static_cast<size_t>(rank)];
    if (rank == rank_) {
      copyOwn(at(own.data), at(output.data), bytes);
    } else {
      await(rank, output.bytes);
      copyOut(rank, at(output.data), bytesOfRound(output.bytes), 0);
    }
  }
  done();
}

void SharedProgram::scatter() {
  const Buffer output = operation_.outputs.front();
  const size_t bytes = bytesOfRound(output.bytes);
  beginStep(true);
  if (rank_ != operation_.root) {
    await(operation_.root, output.bytes);
    copyOut(operation_.root, at(output.data), bytes, part_bytes_ * static_cast<size_t>(rank_));
    return done();
  }
  for (int rank = 0; rank < size_; ++rank) {
    const Buffer piece = operation_.inputs[static_cast<size_t>(rank)];
    if (rank == rank_) {
      copyOwn(at(piece.data), at(output.data), bytes);
    } else {
      contribute(at(piece.data), bytesOfRound(piece.bytes),
                 part_bytes_ * static_cast<size_t>(rank));
    }
  }
  publish(output.bytes);
  done();
}

void SharedProgram::reduceScatter() {
  beginStep(true);
  for (int rank = 0; rank < size_; ++rank) {
    const Buffer piece = operation_.inputs[static_cast<size_t>(rank)];
    if (rank == rank_ && !scales_) continue;
    contribute(at(piece.data), bytesOfRound(piece.bytes), part_bytes_ * static_cast<size_t>(rank));
  }
  const size_t longest = bytesOfRound(longestOf(operation_.inputs));
  publish(longest);
  awaitAll(longest);
  const Buffer own = operation_.inputs[static_cast<size_t>(rank_)];
  reduceOut(at(own.data), at(operation_.outputs.front().data), bytesOfRound(own.bytes),
            part_bytes_ * static_cast<size_t>(rank_));
  done();
}

// The first slot begins with the row of sizes, which only its sender knows: all learn from them how
// many rounds there are. The first parts come behind it.
void SharedProgram::alltoall() {
  beginStep(true);
  const auto place = [this](int rank) {
    return rowBytes() + part_bytes_ * static_cast<size_t>(rank);
  };
  if (round_ == 0) {
    contribute(reinterpret_cast<uint8_t*>(row_.data()), row_.size() * sizeof(uint64_t), 0);
  }
  for (int rank = 0; rank < size_; ++rank) {
    const Buffer piece = operation_.inputs[static_cast<size_t>(rank)];
    longest_learnt_ = std::max(longest_learnt_, piece.bytes);
    if (rank != rank_) contribute(at(piece.data), bytesOfRound(piece.bytes), place(rank));
  }
  publish(0);
  const Buffer own = operation_.inputs[static_cast<size_t>(rank_)];
  copyOwn(at(own.data), at(operation_.outputs[static_cast<size_t>(rank_)].data),
          bytesOfRound(own.bytes));
  for (int distance = 1; distance < size_; ++distance) {
    const int peer = (rank_ + distance) % size_;
    await(peer, 0);
    if (round_ == 0) {
      SharedInstruction& learn = push(SharedInstruction::Kind::kLearn);
      learn.peer = peer;
      learn.from = theirs(peer, 0);
    }
    const Buffer output = operation_.outputs[static_cast<size_t>(peer)];
    copyOut(peer, at(output.data), bytesOfRound(output.bytes), place(rank_));
  }
  done();
}

std::string SharedProgram::learn(int peer, const uint64_t* row) {
  for (int rank = 0; rank < size_; ++rank) {
    longest_learnt_ = std::max(longest_learnt_, static_cast<size_t>(row[rank]));
  }
  const size_t wanted = operation_.outputs[static_cast<size_t>(peer)].bytes;
  const auto sent = static_cast<size_t>(row[rank_]);
  if (sent == wanted) return {};
  return "it sent " + std::to_string(sent) + " bytes, where rank " + std::to_string(rank_) +
         " expects " + std::to_string(wanted) + " bytes";
}

// ---------------------------------------------------------------- instructions

SharedInstruction& SharedProgram::push(SharedInstruction::Kind kind) {
  SharedInstruction& made = out_->emplace_back();
  made.kind = kind;
  made.step = step_;
  return made;
}

void SharedProgram::beginStep(bool has_data) {
  step_ = ++position_.step;
  free_by_ = freeLineBy();
  if (!has_data || in_ == In::kLine) return;
  chunk_ = position_.chunk++;
  free_by_ = std::max(free_by_, position_.read_by[chunk_ % kSharedSlots]);
}

uint64_t SharedProgram::freeLineBy() const {
  return step_ > kSharedLines ? step_ - kSharedLines : 0;
}

size_t SharedProgram::rowBytes() const {
  const size_t bytes = static_cast<size_t>(size_) * sizeof(uint64_t);
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

SharedPart SharedProgram::theirs(int rank, size_t offset) const {
  SharedPart part;
  part.in = in_;
  part.rank = rank;
  part.at = in_ == In::kLine ? step_ : chunk_;
  part.offset = offset;
  return part;
}

SharedPart SharedProgram::user(uint8_t* data) {
  SharedPart part;
  part.user = data;
  return part;
}

// Before the first writing in a step.
void SharedProgram::ensureFree() {
  if (free_by_ > 0) push(SharedInstruction::Kind::kAwaitFree).step = free_by_;
  free_by_ = 0;
}

void SharedProgram::contribute(uint8_t* data, size_t bytes, size_t offset) {
  if (bytes == 0) return;
  ensureFree();
  using Kind = SharedInstruction::Kind;
  SharedInstruction& made = push(scales_ ? Kind::kScale : Kind::kCopy);
  made.from = user(data);
  made.to = here(offset);
  made.bytes = bytes;
}

void SharedProgram::publish(size_t bytes) {
  ensureFree();
  push(SharedInstruction::Kind::kPublish).bytes = bytes;
}

void SharedProgram::await(int peer, size_t bytes) {
  SharedInstruction& made = push(SharedInstruction::Kind::kAwait);
  made.peer = peer;
  made.bytes = bytes;
}

void SharedProgram::awaitAll(size_t bytes) {
  for (int distance = 1; distance < size_; ++distance) await((rank_ + distance) % size_, bytes);
}

void SharedProgram::copyOut(int peer, uint8_t* to, size_t bytes, size_t offset) {
  if (bytes == 0) return;
  SharedInstruction& made = push(SharedInstruction::Kind::kCopy);
  made.from = theirs(peer, offset);
  made.to = user(to);
  made.bytes = bytes;
}

void SharedProgram::copyOwn(const uint8_t* from, uint8_t* to, size_t bytes) {
  if (bytes == 0 || from == to) return;
  SharedInstruction& made = push(SharedInstruction::Kind::kCopy);
  made.from = user(const_cast<uint8_t*>(from));  // copied from, only
  made.to = user(to);
  made.bytes = bytes;
}

void SharedProgram::reduceOut(const uint8_t* own, uint8_t* to, size_t bytes, size_t offset) {
  if (bytes == 0) return;
  SharedInstruction& made = push(SharedInstruction::Kind::kReduce);
  made.from = theirs(rank_, offset);
  made.to = user(to);
  made.bytes = bytes;
  made.own = scales_ ? nullptr : own;
}

void SharedProgram::done() {
  push(SharedInstruction::Kind::kDone);
  if (in_ == In::kSlot && operation_.kind != OpKind::kBarrier) {
    uint64_t& read_by = position_.read_by[chunk_ % kSharedSlots];
    read_by = std::max(read_by, step_);
  }
}

}  // namespace torchft_ext
