// What NCCL's host code hands to its kernels, as far as the kernels here read it: NCCL 2.28.
//
// The names are ours; what is where was read in NCCL's sources (src/include/device.h, comm.h,
// net_device.h at 2.28) and is checked as far as it can be when a plan is launched.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace torchft_ext::nccl_host {

inline constexpr int kProtocols = 3;
inline constexpr int kSimple = 2;  // of the protocols, the one that is here
inline constexpr uint64_t kSteps = 8;
inline constexpr int kConnections = 2;

// Between a kernel and its proxy, for each step in flight.
struct StepSlot {
  int mode;  // kOffsetMode: the data is at `offset`
  int offset;
  ssize_t size;
  void* pointer;
};
inline constexpr int kOffsetMode = 1;

struct Connection {
  char* buffers[kProtocols];
  void* registrations[kProtocols];
  uint64_t* tail;  // how many steps the sender has filled
  uint64_t* head;  // how many the receiver has emptied
  int flags;
  int shared;
  int step_bytes;
  void** exchanged_pointer;
  uint64_t* exchanged_argument;
  StepSlot* slots;  // null: no proxy is to be told
  uint64_t step;
  uint64_t last_cleaning;
  char net_device[32];
};
static_assert(sizeof(Connection) == 152);

struct PeerConnections {
  Connection send[kConnections];
  Connection recv[kConnections];
};

struct Ring {
  int previous;
  int next;
  int* ranks;  // from this one on
  int index;
};

struct alignas(16) Channel {
  PeerConnections** peers;
  Ring ring;
  char trees[308];  // of other algorithms
  uint32_t* done;
  uint64_t work_counter;
};
static_assert(sizeof(Channel) == 368);

struct DeviceComm {
  int rank;
  int size;
  int node;
  int nodes;
  int buffer_bytes[kProtocols];
  int p2p_chunk_bytes;
  int all_nvlink;
  int* dense_ranks;
  volatile uint32_t* abort_flag;
  Channel* channels;
};
static_assert(offsetof(DeviceComm, abort_flag) == 48);

enum class WorkKind : unsigned { kTransfer = 0, kCollective = 1, kRegisteredCollective = 2 };

struct alignas(16) Transfer {
  char* send_from;
  char* recv_to;
  size_t send_bytes;
  size_t recv_bytes;
  int send_rank;
  int recv_rank;
  uint8_t channels;
  uint8_t first_channel;
  uint8_t send_channels;
  uint8_t recv_channels;
  uint8_t send_chunk;  // a float of 8 bits, 3 of them mantissa
  uint8_t recv_chunk;
  uint8_t send_ll : 1, recv_ll : 1, send_registered : 1, recv_registered : 1, send_ipc : 1,
      recv_ipc : 1, profiled : 1;
};
static_assert(sizeof(Transfer) == 48);

struct alignas(16) Collective {
  uint32_t first_channel : 8, last_channel : 8, warps : 8, argument_is_pointer : 1, registered : 1,
      net_registered : 1, one_node : 1, direct : 2, one_rank_a_node : 1, profiled : 1;
  uint32_t root;
  char* output;
  char* input;
  uintptr_t input_offset;
  uintptr_t output_offset;
  uintptr_t* remote_inputs;
  uintptr_t* remote_outputs;
  size_t count_first, count_middle, count_last;                      // elements of the channels
  uint64_t grains_first : 21, grains_middle : 21, grains_last : 21;  // a chunk's, of 512 bytes
  uint64_t argument;                                                 // of the reduction
};
static_assert(sizeof(Collective) == 96);

struct alignas(16) Batch {
  uint32_t next_jump : 14, next_extends : 1, kind : 2, function : 15;
  uint32_t offset;
  uint64_t which;
};
static_assert(sizeof(Batch) == 16);

struct alignas(16) Plan {
  DeviceComm* comm;
  uint64_t channels;
  uint8_t storage;  // 0: the work follows the batches
  uint32_t work_mask;
  char* work;
};
static_assert(sizeof(Plan) == 32);

}  // namespace torchft_ext::nccl_host
