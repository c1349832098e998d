// Carries out one operation's program after the other on a board, as far as it may: whoever calls
// run() may stop where it would have to wait, and another thread may go on from there.
//
// Owner: the lane. One thread at a time. It never blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/operation.h"
#include "host/shared_board.h"
#include "host/shared_program.h"

namespace torchft_ext {

// Of a process: its generations that share memory, and how many exchanges each plan has run,
// barriers left out. Any thread.
struct SharedUse {
  std::atomic<uint64_t> generations{0};
  std::array<std::atomic<uint64_t>, kSharedPlans> by_plan{};
};

class SharedExecution {
 public:
  enum class State : uint8_t {
    kDone,      // the operation is complete
    kWaits,     // for peer(): run() again once mayGoOn()
    kTurn,      // the budget is used up
    kMismatch,  // peer() runs something else: how() says what
    kNoMemory,
  };

  // use: of the process.
  SharedExecution(SharedBoard& board, int rank, int size, SharedPlans plans,
                  std::shared_ptr<SharedUse> use)
      : board_(board), rank_(rank), size_(size), plans_(std::move(plans)), use_(std::move(use)) {}

  // An exchange of its own for the others. The operation outlives it.
  void begin(const Operation& operation);
  // budget: bytes that it may move; what is left of it comes back. It also stops after so many
  // instructions.
  State run(size_t* budget, size_t instructions = std::numeric_limits<size_t>::max());

  int peer() const { return peer_; }
  const std::string& how() const { return how_; }
  bool mayGoOn();
  // Bytes since the last call: written for others, and read of theirs.
  uint64_t takeWritten() { return std::exchange(written_, 0); }
  uint64_t takeRead() { return std::exchange(read_, 0); }

 private:
  using Kind = SharedInstruction::Kind;

  bool carryOut(SharedInstruction& instruction, size_t* budget);
  bool awaits(const SharedInstruction& instruction);
  bool allAreDone(uint64_t step);
  bool agrees(const SharedInstruction& instruction);
  void mismatch(const SharedOperationMark& theirs, const SharedOperationMark& ours);
  // Some of it: what is left stays in the instruction.
  bool moveSome(SharedInstruction& instruction, size_t* budget);
  void count(const SharedInstruction& instruction, size_t bytes);
  void reduceSome(const SharedInstruction& instruction, size_t bytes);
  bool learn(const SharedInstruction& instruction);
  uint8_t* writable(const SharedPart& part);
  const uint8_t* readable(const SharedPart& part, int rank) const;
  void finish();

  SharedBoard& board_;
  const int rank_;
  const int size_;
  const SharedPlans plans_;
  const std::shared_ptr<SharedUse> use_;
  const Operation* operation_ = nullptr;
  std::optional<SharedProgram> program_;
  std::vector<SharedInstruction> instructions_;  // of this round
  size_t next_ = 0;
  SharedPosition position_;
  SharedOperationMark mark_;
  uint64_t number_ = 0;
  uint64_t history_ = 0;
  uint64_t written_ = 0;
  uint64_t read_ = 0;
  State state_ = State::kDone;
  int peer_ = -1;
  std::string how_;
};

}  // namespace torchft_ext
