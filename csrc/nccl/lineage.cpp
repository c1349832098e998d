#include "nccl/lineage.h"

#include <cstring>
#include <set>

namespace torchft_ext {
namespace {

// A process that has two ranks of one group cannot tell which of them went.
bool hasTwice(const std::vector<Incarnation>& members) {
  return std::set<Incarnation>(members.begin(), members.end()).size() != members.size();
}

}  // namespace

uint64_t lineageId(const Nonce& nonce) {
  uint64_t id = 0;
  std::memcpy(&id, nonce.bytes.data(), sizeof(id));
  return id == 0 ? 1 : id;
}

uint64_t nthOfEpoch(uint64_t first, uint64_t n) {
  const uint64_t id = first + n * 0x9e3779b97f4a7c15;  // odd: they all differ
  return id == 0 ? 1 : id;
}

std::optional<std::vector<int>> leftOut(const std::vector<Incarnation>& old,
                                        const std::vector<Incarnation>& now) {
  if (now.size() < 2 || hasTwice(old) || hasTwice(now)) return std::nullopt;
  std::vector<int> excluded;
  size_t found = 0;
  for (size_t rank = 0; rank < old.size(); ++rank) {
    if (found < now.size() && old[rank] == now[found]) {
      ++found;
    } else {
      excluded.push_back(static_cast<int>(rank));
    }
  }
  if (found < now.size()) return std::nullopt;
  return excluded;
}

}  // namespace torchft_ext
