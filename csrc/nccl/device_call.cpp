#include "nccl/device_call.h"

#include <bit>

#include "nccl/nccl_calls.h"
#include "nccl/nccl_group.h"

namespace torchft_ext {
namespace {

// FNV-1a, a value at a time.
class Digest {
 public:
  void add(uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      sum_ ^= (value >> (8 * byte)) & 0xff;
      sum_ *= 0x100000001b3;
    }
  }
  // NCCL connects all channels of a peer for a message of any size, and for none if it is empty;
  // for a collective as many as its size takes.
  void add(const std::vector<Buffer>& buffers, bool messages) {
    add(buffers.size());
    for (const Buffer& buffer : buffers)
      add(messages ? static_cast<uint64_t>(buffer.bytes > 0) : std::bit_width(buffer.bytes));
  }
  uint64_t sum() const { return sum_; }

 private:
  uint64_t sum_ = 0xcbf29ce484222325;
};

bool madeOfMessages(OpKind kind) {
  switch (kind) {
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAlltoall:
    case OpKind::kSend:
    case OpKind::kRecv:
      return true;
    default:
      return false;
  }
}

}  // namespace

NcclResult callInGroup(NcclApi& nccl, const DeviceCalls& calls) {
  NcclGroup group(nccl);
  if (group.started() != NcclResult::kSuccess) return group.started();
  NcclResult first_error = NcclResult::kSuccess;
  for (const DeviceCall& call : calls) {
    const DeviceCommSetup& comm = call.comm->setup();
    const CallTarget target{nccl,      call.comm->handle(), call.stream,       comm.rank,
                            comm.size, 1 - comm.rank,       call.scratch.get()};
    first_error = makeCalls(*call.operation, call.flat, target);
    if (first_error != NcclResult::kSuccess) break;
  }
  const NcclResult ended = group.end();
  return first_error == NcclResult::kSuccess ? ended : first_error;
}

NcclResult callThroughGates(const std::vector<std::shared_ptr<DeviceComm>>& comms,
                            const DeviceCalls& calls, Deadline deadline) {
  const DeviceCommSetup& setup = comms.front()->setup();
  const OnDevice on_device(setup.device);
  // What NCCL allocates to connect must not end a capture of another thread's.
  const auto relaxed = setup.platform->cuda->relaxCapture();
  std::vector<std::unique_ptr<GateEntry>> entries;
  for (const auto& comm : comms) {
    entries.push_back(std::make_unique<GateEntry>(comm->gate(), deadline));
    if (!entries.back()->entered()) return NcclResult::kInProgress;
  }
  return callInGroup(*setup.platform->nccl, calls);
}

uint64_t shapeOf(const DeviceCalls& calls, const DeviceComm& comm) {
  Digest digest;
  for (const DeviceCall& call : calls) {
    if (call.comm.get() != &comm) continue;
    const Operation& operation = *call.operation;
    digest.add(static_cast<uint64_t>(operation.kind));
    digest.add(static_cast<uint64_t>(operation.dtype));
    digest.add(static_cast<uint64_t>(operation.reduce));
    digest.add(static_cast<uint64_t>(operation.root));
    digest.add(static_cast<uint64_t>(operation.peer));
    digest.add(call.flat ? 1 : 0);
    digest.add(operation.inputs, madeOfMessages(operation.kind));
    digest.add(operation.outputs, madeOfMessages(operation.kind));
  }
  return digest.sum();
}

}  // namespace torchft_ext
