// Where the ranks of one simulated communicator meet and exchange bytes: one piece of shared
// memory, between threads of one process and between processes alike.
//
// The process that asked for the unique id owns the memory's descriptor (the "root") until every
// rank has joined; the id says how to open it (/proc/PID/fd/N). Nobody notices a dead or frozen
// rank: its bytes just do not come, as with the real library. Nothing is left behind by any death.
//
// Owner: communicators share it within a process. Threads: each rank's methods from one thread at
// a time. Nothing here blocks but transfer(), until it is stopped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "nccl/nccl_types.h"

namespace torchft_ext::sim {

inline constexpr int kMaxRanks = 16;

struct MessageHeader {
  uint32_t what = 0;  // kind and arguments, hashed: differs between ranks that are out of step
  uint32_t sequence = 0;
  uint64_t bytes = 0;
};

struct Transfer {
  enum class Channel { kCollective, kMessage };
  Channel channel = Channel::kCollective;
  bool sending = false;
  int peer = 0;
  MessageHeader header;
  char* data = nullptr;  // read or written
  // Progress, counted with the header.
  size_t done = 0;
  bool mismatched = false;  // the peer sent something else: it never ends
};

class Exchange {
 public:
  // New shared memory, with this process as its root. Null: out of descriptors.
  static std::shared_ptr<Exchange> create(NcclUniqueId* id);
  // Null: there is no such root (any more).
  static std::shared_ptr<Exchange> open(const NcclUniqueId& id);
  // Descriptors that this process holds for ranks that have not come yet.
  static int liveRoots();
  ~Exchange();

  // kTwice: another one is this rank already. kDisagrees: others have come with another size, upon
  // which the real library's root gives up; so this one does.
  enum class Joined { kYes, kTwice, kDisagrees };
  Joined join(int rank, int size);
  bool complete() const;  // everyone has joined
  // Lets the root go although nobody joined: one of several ids of one communicator.
  void dismiss();
  // Lets the root go because it comes to nothing: never complete, unless it is already.
  void giveUp();

  // Moves all of them, in order for each peer and channel. False: stopped before; as the real
  // library's kernels, which then run through their remaining steps, a stopped collective lets
  // those of its peers that wait for it end with what lies in the buffers, which is junk here.
  bool transfer(int rank, std::vector<Transfer>& transfers, const std::atomic<bool>& stop);

 private:
  struct Region;
  class Roots;
  explicit Exchange(Region* region) : region_(region) {}
  static std::shared_ptr<Exchange> map(int descriptor);
  void runThrough(int rank, const std::vector<Transfer>& stopped);
  bool advance(int rank, Transfer& transfer);
  bool advanceSend(int rank, Transfer& transfer);
  bool advanceReceive(int rank, Transfer& transfer);

  Region* const region_;
};

}  // namespace torchft_ext::sim
