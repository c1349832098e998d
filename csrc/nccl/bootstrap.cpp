#include "nccl/bootstrap.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

namespace torchft_ext {
namespace {

// As it travels; little-endian, as all frames are.
struct Message {
  static constexpr uint64_t kMagic = 0x314c43434e544654;  // "TFTNCCL1"
  uint64_t magic = kMagic;
  uint64_t ordinal = 0;
  uint64_t device_type = 0;
  NcclUniqueId id;
};
using Bytes = std::array<uint8_t, sizeof(Message)>;
static_assert(sizeof(Message) == 24 + 128);

void failMismatch(const Bootstrap& bootstrap, const Message& message) {
  Failure failure;
  failure.kind = FailureKind::kMismatch;
  failure.op = toString(bootstrap.kind);
  failure.seq = bootstrap.seq;
  failure.cause.how = message.magic != Message::kMagic
                          ? "what came is not the id of an NCCL communicator"
                          : "ranks make different NCCL communicators: number " +
                                std::to_string(message.ordinal) + " for device type " +
                                std::to_string(message.device_type) + " there, number " +
                                std::to_string(bootstrap.ordinal) + " for device type " +
                                std::to_string(bootstrap.device_type) + " here";
  bootstrap.lifecycle->fail(std::move(failure));
}

Operation transfer(const Bootstrap& bootstrap, bool sends, const std::shared_ptr<Bytes>& bytes) {
  Operation operation;
  const Buffer buffer{bytes->data(), bytes->size()};
  operation.keep_alive = bytes;
  if (bootstrap.peer < 0) {
    operation.kind = OpKind::kBroadcast;
    operation.outputs = {buffer};
    return operation;
  }
  operation.kind = sends ? OpKind::kSend : OpKind::kRecv;
  operation.peer = bootstrap.peer;
  operation.tag = kBootstrapTag | bootstrap.ordinal;
  (sends ? operation.inputs : operation.outputs) = {buffer};
  return operation;
}

}  // namespace

std::optional<NcclUniqueId> spreadUniqueId(const Bootstrap& bootstrap, const NcclUniqueId* own) {
  auto bytes = std::make_shared<Bytes>();
  Message message;
  if (own != nullptr) {
    message.ordinal = bootstrap.ordinal;
    message.device_type = static_cast<uint64_t>(bootstrap.device_type);
    message.id = *own;
    std::memcpy(bytes->data(), &message, sizeof(message));
  }
  const Duration left =
      bootstrap.deadline.isNever() ? Duration(-1) : bootstrap.deadline.remaining();
  auto state = std::make_shared<OpState>(bootstrap.lifecycle, bootstrap.kind, bootstrap.seq, left);
  Operation operation = transfer(bootstrap, own != nullptr, bytes);
  operation.timeout = left;
  bootstrap.control.issue(state, std::move(operation));
  if (!state->wait(bootstrap.deadline) || state->failure()) return std::nullopt;
  if (own != nullptr) return *own;
  std::memcpy(static_cast<void*>(&message), bytes->data(), sizeof(message));
  if (message.magic == Message::kMagic && message.ordinal == bootstrap.ordinal &&
      message.device_type == static_cast<uint64_t>(bootstrap.device_type))
    return message.id;
  failMismatch(bootstrap, message);
  return std::nullopt;
}

}  // namespace torchft_ext
