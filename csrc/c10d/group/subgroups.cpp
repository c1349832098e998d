#include "c10d/group/subgroups.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torchft_ext {
std::vector<int> checkedMembers(const std::string& what, const std::vector<int>& ranks, int size) {
  TORCH_CHECK_VALUE(!ranks.empty(), what, ": expected at least one rank, found none");
  std::vector<int> ascending = ranks;
  std::sort(ascending.begin(), ascending.end());
  for (const int rank : ascending) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size, what, ": expected ranks from 0 to ", size - 1,
                      ", found ", rank);
  }
  const auto twice = std::adjacent_find(ascending.begin(), ascending.end());
  TORCH_CHECK_VALUE(twice == ascending.end(), what, ": expected each rank once, found ",
                    twice == ascending.end() ? -1 : *twice, " twice");
  return ranks;
}

std::vector<int> membersWithout(const std::string& what, const std::vector<int64_t>& excluded,
                                int size) {
  std::vector<int> narrow;
  for (const int64_t rank : excluded) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size, what, ": expected ranks from 0 to ", size - 1,
                      ", found ", rank);
    narrow.push_back(static_cast<int>(rank));
  }
  std::vector<int> gone = checkedMembers(what, narrow, size);
  std::sort(gone.begin(), gone.end());
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
