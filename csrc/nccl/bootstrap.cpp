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
  static constexpr uint64_t kMagic = 0x324c43434e544654;  // "TFTNCCL2"
  uint64_t magic = kMagic;
  uint64_t tag = 0;  // kind and ordinal
  uint64_t device_type = 0;
  NcclUniqueId id;
};
constexpr uint64_t kPairTag = uint64_t{1} << 62;
using Bytes = std::array<uint8_t, sizeof(Message)>;
static_assert(sizeof(Message) == 24 + 128);

std::string described(uint64_t tag, uint64_t device_type) {
  return "number " + std::to_string(tag & ~(kEngineTag | kPairTag)) +
         ((tag & kPairTag) != 0 ? " of two ranks" : " of all ranks") + " for device type " +
         std::to_string(device_type);
}

void failMismatch(const Bootstrap& bootstrap, const Message& message) {
  Failure failure;
  failure.kind = FailureKind::kMismatch;
  failure.op = toString(bootstrap.kind);
  failure.seq = bootstrap.seq;
  failure.cause.how =
      message.magic != Message::kMagic
          ? "what came is not the id of an NCCL communicator"
          : "ranks make different NCCL communicators: " +
                described(message.tag, message.device_type) + " there, " +
                described(tagOf(bootstrap), static_cast<uint64_t>(bootstrap.device_type)) + " here";
  bootstrap.lifecycle->fail(std::move(failure));
}

std::shared_ptr<OpState> transfer(const Bootstrap& bootstrap, OpKind kind, int peer,
                                  const std::shared_ptr<Bytes>& bytes) {
  Operation operation;
  operation.kind = kind;
  operation.peer = peer;
  operation.tag = tagOf(bootstrap);
  operation.keep_alive = bytes;
  operation.timeout = bootstrap.deadline.isNever() ? Duration(-1) : bootstrap.deadline.remaining();
  auto& buffers = kind == OpKind::kSend ? operation.inputs : operation.outputs;
  buffers = {Buffer{bytes->data(), bytes->size()}};
  auto state = std::make_shared<OpState>(bootstrap.lifecycle, bootstrap.kind, bootstrap.seq,
                                         operation.timeout);
  bootstrap.control.issue(state, std::move(operation));
  return state;
}

TreePlace placeOf(const Bootstrap& bootstrap) {
  const EpochIdentity& identity = bootstrap.lifecycle->identity();
  if (bootstrap.peer < 0) return placeInTree(identity.rank, identity.size);
  if (identity.rank < bootstrap.peer) return {-1, {bootstrap.peer}};
  return {bootstrap.peer, {}};
}

Message messageOf(const Bootstrap& bootstrap, const NcclUniqueId& id) {
  Message message;
  message.tag = tagOf(bootstrap);
  message.device_type = static_cast<uint64_t>(bootstrap.device_type);
  message.id = id;
  return message;
}

bool agrees(const Bootstrap& bootstrap, const Message& message) {
  return message.magic == Message::kMagic && message.tag == tagOf(bootstrap) &&
         message.device_type == static_cast<uint64_t>(bootstrap.device_type);
}

}  // namespace

uint64_t tagOf(const Bootstrap& bootstrap) {
  return kEngineTag | (bootstrap.peer < 0 ? 0 : kPairTag) | bootstrap.ordinal;
}

// Binomial: the parent is the rank without its lowest bit; the largest subtree is served first.
TreePlace placeInTree(int rank, int size) {
  TreePlace place;
  if (rank > 0) place.parent = rank & (rank - 1);
  const int own_bit = rank > 0 ? rank & -rank : 1 << 30;
  for (int bit = 1; bit < own_bit && rank + bit < size; bit <<= 1)
    place.children.insert(place.children.begin(), rank + bit);
  return place;
}

std::optional<NcclUniqueId> spreadUniqueId(const Bootstrap& bootstrap, const NcclUniqueId* own) {
  const TreePlace place = placeOf(bootstrap);
  auto bytes = std::make_shared<Bytes>();
  Message message;
  if (own != nullptr) {
    message = messageOf(bootstrap, *own);
    std::memcpy(bytes->data(), &message, sizeof(message));
  } else {
    const auto state = transfer(bootstrap, OpKind::kRecv, place.parent, bytes);
    if (!state->wait(bootstrap.deadline) || state->failure()) return std::nullopt;
    std::memcpy(static_cast<void*>(&message), bytes->data(), sizeof(message));
    if (!agrees(bootstrap, message)) {
      failMismatch(bootstrap, message);
      return std::nullopt;
    }
  }
  for (const int child : place.children) transfer(bootstrap, OpKind::kSend, child, bytes);
  return message.id;
}

}  // namespace torchft_ext
