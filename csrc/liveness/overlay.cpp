#include "liveness/overlay.h"

#include <algorithm>

namespace torchft_ext {
namespace {

// The members `step` places before and after it.
void addBothAt(size_t step, size_t self, const std::vector<int>& ranks, std::vector<int>& into) {
  const size_t size = ranks.size();
  into.push_back(ranks[(self + step) % size]);
  into.push_back(ranks[(self + size - step) % size]);
}

std::vector<int> neighboursUpTo(size_t longest_step, int self_rank, const std::vector<int>& ranks) {
  const auto place = std::lower_bound(ranks.begin(), ranks.end(), self_rank);
  const auto self = static_cast<size_t>(place - ranks.begin());
  std::vector<int> found;
  for (size_t step = 1; step <= longest_step; step *= 2) addBothAt(step, self, ranks, found);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace

std::vector<int> overlayNeighbours(int self_rank, const std::vector<int>& ranks) {
  return neighboursUpTo(ranks.size() / 2, self_rank, ranks);
}

std::vector<int> ringNeighbours(int self_rank, const std::vector<int>& ranks) {
  return neighboursUpTo(ranks.size() > 1 ? 1 : 0, self_rank, ranks);
}

}  // namespace torchft_ext
