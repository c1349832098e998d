#include "c10d/subgroups.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torchft_ext {
std::vector<int> checkedMembers(const std::string& what, const std::vector<int>& ranks, int size) {
  TORCH_CHECK_VALUE(!ranks.empty(), what, ": expected at least one rank, found none");
  std::vector<int> members = ranks;
  std::sort(members.begin(), members.end());
  for (const int rank : members) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size, what, ": expected ranks from 0 to ", size - 1,
                      ", found ", rank);
  }
  const auto twice = std::adjacent_find(members.begin(), members.end());
  TORCH_CHECK_VALUE(twice == members.end(), what, ": expected each rank once, found ",
                    twice == members.end() ? -1 : *twice, " twice");
  return members;
}

std::vector<int> membersWithout(const std::string& what, const std::vector<int64_t>& excluded,
                                int size) {
  std::vector<int> narrow;
  for (const int64_t rank : excluded) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size, what, ": expected ranks from 0 to ", size - 1,
                      ", found ", rank);
    narrow.push_back(static_cast<int>(rank));
  }
  const std::vector<int> gone = checkedMembers(what, narrow, size);
  std::vector<int> left;
  for (int rank = 0; rank < size; ++rank) {
    if (!std::binary_search(gone.begin(), gone.end(), rank)) left.push_back(rank);
  }
  TORCH_CHECK_VALUE(!left.empty(), what, ": expected some of the ", size,
                    " ranks to be left, found all of them");
  return left;
}

std::string nameOfMembers(const std::vector<int>& members, int size) {
  constexpr int kBits = 4;
  std::string mask(static_cast<size_t>((size + kBits - 1) / kBits), '\0');
  for (const int rank : members)
    mask[static_cast<size_t>(rank / kBits)] |= static_cast<char>(1 << (rank % kBits));
  for (char& digit : mask) digit = "0123456789abcdef"[static_cast<unsigned char>(digit)];
  return mask;
}

}  // namespace torchft_ext
