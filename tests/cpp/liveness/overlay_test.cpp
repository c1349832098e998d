#include "liveness/overlay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <queue>

namespace torchft_ext {
namespace {

std::vector<int> ranksOf(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

int logOf(int size) {
  int log = 0;
  while ((1 << log) < size) ++log;
  return log;
}

// The most hops from rank 0 to anyone; -1: somebody cannot be reached.
int hopsFromZero(const std::vector<int>& ranks) {
  std::vector<int> hops(static_cast<size_t>(ranks.back()) + 1, -1);
  std::queue<int> next({ranks.front()});
  hops[static_cast<size_t>(ranks.front())] = 0;
  int most = 0;
  for (size_t reached = 0; !next.empty(); ++reached, next.pop()) {
    most = std::max(most, hops[static_cast<size_t>(next.front())]);
    for (const int neighbour : overlayNeighbours(next.front(), ranks)) {
      int& found = hops[static_cast<size_t>(neighbour)];
      if (found >= 0) continue;
      found = hops[static_cast<size_t>(next.front())] + 1;
      next.push(neighbour);
    }
    if (reached + 1 == ranks.size()) return most;
  }
  return -1;
}

TEST(Overlay, FewConnectionsAndFewHopsForEverySize) {
  for (int size = 2; size <= 300; ++size) {
    const auto connections = overlayNeighbours(0, ranksOf(size)).size();
    EXPECT_LE(static_cast<int>(connections), 2 * logOf(size) + 2) << size;
    const int hops = hopsFromZero(ranksOf(size));
    EXPECT_GE(hops, 1) << size << ": not connected";
    EXPECT_LE(hops, logOf(size)) << size;
  }
}

TEST(Overlay, NeighboursAreMutualWhateverTheRanks) {
  const std::vector<int> ranks{0, 3, 4, 9, 10, 11, 17, 40, 41, 55, 60};
  for (const int rank : ranks) {
    for (const int neighbour : overlayNeighbours(rank, ranks)) {
      const std::vector<int> back = overlayNeighbours(neighbour, ranks);
      EXPECT_NE(std::find(back.begin(), back.end(), rank), back.end());
    }
  }
  EXPECT_GT(hopsFromZero(ranks), 0);
}

TEST(Overlay, SmallWorldsAreMeshes) {
  EXPECT_TRUE(overlayNeighbours(0, {0}).empty());
  EXPECT_EQ(overlayNeighbours(1, {0, 1}), (std::vector{0}));
  EXPECT_EQ(overlayNeighbours(1, ranksOf(3)), (std::vector{0, 2}));
  EXPECT_EQ(overlayNeighbours(3, ranksOf(5)), (std::vector{0, 1, 2, 4}));
}

TEST(Overlay, RingIsTheRanksBeforeAndAfter) {
  EXPECT_TRUE(ringNeighbours(0, {0}).empty());
  EXPECT_EQ(ringNeighbours(2, {2, 7}), (std::vector{7}));
  EXPECT_EQ(ringNeighbours(0, ranksOf(8)), (std::vector{1, 7}));
  EXPECT_EQ(ringNeighbours(4, {0, 4, 5, 6}), (std::vector{0, 5}));
}

}  // namespace
}  // namespace torchft_ext
