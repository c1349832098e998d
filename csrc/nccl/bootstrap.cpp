#include "nccl/bootstrap.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace torchft_ext {
namespace {

// As it travels, before the ids; little-endian, as all frames are.
struct Header {
  static constexpr uint64_t kMagic = 0x354c43434e544654;  // "TFTNCCL5"
  uint64_t magic = kMagic;
  uint64_t tag = 0;  // kind and ordinal
  uint64_t device_type = 0;
  uint64_t ids = 1;
};
constexpr uint64_t kPairTag = uint64_t{1} << 62;
constexpr uint64_t kMeetTag = uint64_t{1} << 61;
using Bytes = std::vector<uint8_t>;
using Ids = std::vector<NcclUniqueId>;
static_assert(sizeof(Header) == 32 && sizeof(NcclUniqueId) == 128);

std::string described(uint64_t tag, uint64_t device_type) {
  return "number " + std::to_string(tag & ~(kEngineTag | kPairTag | kMeetTag)) +
         ((tag & kPairTag) != 0 ? " of two ranks" : " of all ranks") + " for device type " +
         std::to_string(device_type);
}

void failMismatch(const Bootstrap& bootstrap, const Header& header) {
  Failure failure;
  failure.kind = FailureKind::kMismatch;
  failure.op = toString(bootstrap.kind);
  failure.seq = bootstrap.seq;
  failure.cause.how =
      header.magic != Header::kMagic
          ? "what came is not the id of an NCCL communicator"
          : "ranks make different NCCL communicators: " +
                described(header.tag, header.device_type) + " there, " +
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
                                         operation.timeout, std::nullopt, OpState::Whose::kEngines);
  bootstrap.control.issue(state, std::move(operation));
  return state;
}

TreePlace placeOf(const Bootstrap& bootstrap) {
  const GenerationIdentity& identity = bootstrap.lifecycle->identity();
  if (bootstrap.peer < 0) return placeInTree(identity.rank, identity.size);
  if (identity.rank < bootstrap.peer) return {-1, {bootstrap.peer}};
  return {bootstrap.peer, {}};
}

Header headerOf(const Bootstrap& bootstrap, size_t ids) {
  return {Header::kMagic, tagOf(bootstrap), static_cast<uint64_t>(bootstrap.device_type), ids};
}

bool agrees(const Header& found, const Header& expected) {
  return found.magic == expected.magic && found.tag == expected.tag &&
         found.device_type == expected.device_type && found.ids == expected.ids;
}

std::shared_ptr<Bytes> messageOf(const Bootstrap& bootstrap, const Ids& ids) {
  const Header header = headerOf(bootstrap, ids.size());
  auto bytes = std::make_shared<Bytes>(sizeof(Header) + ids.size() * sizeof(NcclUniqueId));
  std::memcpy(bytes->data(), &header, sizeof(header));
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(bytes->data() + sizeof(header) + i * sizeof(NcclUniqueId), ids[i].bytes.data(),
                sizeof(NcclUniqueId));
  }
  return bytes;
}

std::optional<Ids> receive(const Bootstrap& bootstrap, int from, size_t count) {
  const auto bytes = messageOf(bootstrap, Ids(count));
  const auto state = transfer(bootstrap, OpKind::kRecv, from, bytes);
  if (!state->wait(bootstrap.deadline) || state->failure()) return std::nullopt;
  Header header;
  std::memcpy(&header, bytes->data(), sizeof(header));
  if (!agrees(header, headerOf(bootstrap, count))) {
    failMismatch(bootstrap, header);
    return std::nullopt;
  }
  Ids ids(count);
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(ids[i].bytes.data(), bytes->data() + sizeof(header) + i * sizeof(NcclUniqueId),
                sizeof(NcclUniqueId));
  }
  return ids;
}

// On the lowest rank: its own, and those of the other parts' first ranks.
std::optional<Ids> collect(const Bootstrap& bootstrap, const NcclUniqueId& own) {
  Ids ids{own};
  for (int part = 1; part < bootstrap.roots; ++part) {
    const int size = bootstrap.lifecycle->identity().size;
    const auto one = receive(bootstrap, firstRankOfPart(part, size, bootstrap.roots), 1);
    if (!one) return std::nullopt;
    ids.push_back(one->front());
  }
  return ids;
}

}  // namespace

uint64_t tagOf(const Bootstrap& bootstrap) {
  return kEngineTag | (bootstrap.peer < 0 ? 0 : kPairTag) | (bootstrap.meets ? kMeetTag : 0) |
         bootstrap.ordinal;
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

bool meet(Bootstrap bootstrap) {
  bootstrap.meets = true;
  const TreePlace place = placeOf(bootstrap);
  for (const int child : place.children)
    if (!receive(bootstrap, child, 0)) return false;
  if (place.parent >= 0) {
    transfer(bootstrap, OpKind::kSend, place.parent, messageOf(bootstrap, {}));
    if (!receive(bootstrap, place.parent, 0)) return false;
  }
  for (const int child : place.children)
    transfer(bootstrap, OpKind::kSend, child, messageOf(bootstrap, {}));
  return true;
}

std::optional<std::vector<NcclUniqueId>> spreadUniqueIds(const Bootstrap& bootstrap,
                                                         const NcclUniqueId* own) {
  const TreePlace place = placeOf(bootstrap);
  std::optional<Ids> ids;
  if (place.parent < 0) {
    ids = collect(bootstrap, *own);
  } else {
    if (own != nullptr) transfer(bootstrap, OpKind::kSend, 0, messageOf(bootstrap, {*own}));
    ids = receive(bootstrap, place.parent, static_cast<size_t>(bootstrap.roots));
  }
  if (!ids) return std::nullopt;
  const auto bytes = messageOf(bootstrap, *ids);
  for (const int child : place.children) transfer(bootstrap, OpKind::kSend, child, bytes);
  return ids;
}

int rootsFor(int size, int ranks_per_root) {
  return std::max(1, (size + ranks_per_root - 1) / ranks_per_root);
}

int firstRankOfPart(int part, int size, int roots) {
  return part * (size / roots) + std::min(part, size % roots);
}

bool makesId(int rank, int size, int roots) {
  for (int part = 0; part < roots; ++part)
    if (firstRankOfPart(part, size, roots) == rank) return true;
  return false;
}

}  // namespace torchft_ext
