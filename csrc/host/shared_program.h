// What one rank does in one collective over shared memory: instructions, made by pure functions, a
// round at a time. So every plan is tested without a second process, over every world size.
//
// Rules. All ranks count steps and chunks alike, also those in which they do nothing. A step's
// line, and a chunk's slot, are written once peers have done what read them before (kAwaitFree).
// `done` ascends, and covers a step once no own read of it, or of an earlier one, is left. Elements
// are reduced in the order of ranks, so results are equal on all to the last bit.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/operation.h"
#include "host/shared_board.h"
#include "host/shared_plans.h"

namespace torchft_ext {

// How far a generation's operations have come; equal on all ranks between two operations.
struct SharedPosition {
  uint64_t step = 0;   // the last one that was used
  uint64_t chunk = 0;  // the next one
  // By slot: the step by which its last chunk has been read.
  std::array<uint64_t, kSharedSlots> read_by{};
};

struct SharedPart {
  enum class In : uint8_t { kUser, kLine, kSlot };
  In in = In::kUser;
  int rank = -1;            // whose line or slot
  uint64_t at = 0;          // a step; a chunk
  size_t offset = 0;        // there
  uint8_t* user = nullptr;  // kUser
};

struct SharedInstruction {
  enum class Kind : uint8_t {
    kAwaitFree,  // all peers are done with `step`
    kCopy,       // from -> to
    kScale,      // from * factor -> to
    kPublish,    // `step`, of `bytes` for who reads it
    kAwait,      // `peer` has published `step`, of `bytes`
    kReduce,     // all ranks' parts like `from`, this one's `own` if that is not null -> to, also
    kLearn,      // the sizes that `peer` sends, one for each rank, are at `from`
    kDone,       // with `step`
  };
  Kind kind = Kind::kDone;
  int peer = -1;
  uint64_t step = 0;
  size_t bytes = 0;
  SharedPart from;
  SharedPart to;
  SharedPart also;  // kUser and null: nowhere else
  const uint8_t* own = nullptr;
};

class SharedProgram {
 public:
  // The operation outlives it. One of another kind than a collective's: std::logic_error.
  SharedProgram(const Operation& operation, int rank, int size, size_t slot_bytes,
                const SharedPlans& plans, SharedPosition begin);

  // Appends the next round. False: there is none. The instructions of the round before have been
  // carried out.
  bool next(std::vector<SharedInstruction>* out);
  // What kLearn found: row[i] goes to rank i. Empty: it fits; else what does not.
  std::string learn(int peer, const uint64_t* row);
  // Where the next operation begins, once there is no further round.
  const SharedPosition& position() const { return position_; }
  // nullopt: a barrier.
  std::optional<SharedPlan> plan() const { return plan_; }

 private:
  using In = SharedPart::In;

  void planRounds(const SharedPlans& plans);
  void planParts(size_t longest);
  void choose(const SharedPlans& plans, size_t bytes);
  size_t bytesOfRound(size_t all) const;  // of something that is cut into rounds
  uint64_t freeLineBy() const;
  size_t rowBytes() const;
  uint8_t* at(uint8_t* data) const { return data == nullptr ? nullptr : data + offset_; }

  void emitRound();
  void allreduceOnce();
  void allreduceChunk();
  void copyChunkIn(size_t chunk);
  void reduceChunk(size_t chunk);
  void copyChunkOut(size_t chunk);
  void broadcast();
  void allgather();
  void reduce();
  void gather();
  void scatter();
  void reduceScatter();
  void alltoall();

  // A step of this round: its number, and where its data lies.
  void beginStep(bool has_data);
  SharedPart here(size_t offset) const { return theirs(rank_, offset); }
  SharedPart theirs(int rank, size_t offset) const;
  static SharedPart user(uint8_t* data);
  void ensureFree();
  void contribute(uint8_t* data, size_t bytes, size_t offset);
  void publish(size_t bytes);
  void await(int peer, size_t bytes);
  void awaitAll(size_t bytes);
  void copyOut(int peer, uint8_t* to, size_t bytes, size_t offset);
  void copyOwn(const uint8_t* from, uint8_t* to, size_t bytes);
  void reduceOut(const uint8_t* own, uint8_t* to, size_t bytes, size_t offset);
  void done();
  SharedInstruction& push(SharedInstruction::Kind kind);

  const Operation& operation_;
  const int rank_;
  const int size_;
  const size_t slot_bytes_;
  const bool scales_;  // each rank's contribution
  SharedPosition position_;
  std::vector<SharedInstruction>* out_ = nullptr;

  In in_ = In::kSlot;
  std::optional<SharedPlan> plan_;
  size_t chunk_bytes_ = 0;  // of a slot, what is used at once
  size_t round_bytes_ = 0;  // of what is cut into rounds
  size_t part_bytes_ = 0;   // of one rank's part within a line or slot, where it has parts
  uint64_t rounds_ = 0;
  uint64_t round_ = 0;
  size_t offset_ = 0;  // of this round in what is cut
  uint64_t step_ = 0;  // of this round
  uint64_t chunk_ = 0;
  uint64_t free_by_ = 0;  // peers have to have done that before anything is written in this step
  std::vector<uint64_t> row_;  // of an alltoall: the sizes of what this rank sends
  // Of a chunked allreduce: the steps of two chunks, by parity.
  std::array<uint64_t, 2> in_step_{};
  std::array<uint64_t, 2> reduced_step_{};
  uint64_t first_chunk_ = 0;
  size_t longest_learnt_ = 0;
};

}  // namespace torchft_ext
