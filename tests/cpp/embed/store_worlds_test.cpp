// Worlds of many processes over torch's TCPStore: none opens a connection to it for its group, so
// that a name server which does not answer, and which the store asks about each connection, holds
// nobody up.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "cpp/support/processes.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlower = 10;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr int kSlower = 10;
#else
constexpr int kSlower = 1;
#endif
#else
constexpr int kSlower = 1;
#endif
const std::vector<int> kSizes{24, 32, 48};
// A world of 48 takes 0.6 s on two idle cores; a single look-up without an answer 5 s.
constexpr milliseconds kFormsWithin{4500 * kSlower};
// Of all: 48 processes load torch before.
constexpr std::chrono::seconds kEndsWithin{120 * kSlower};

std::chrono::microseconds slowest(c10d::TCPStore& store, int size) {
  std::chrono::microseconds longest{0};
  for (int rank = 0; rank < size; ++rank) {
    const auto bytes = store.get("took/" + std::to_string(size) + "/" + std::to_string(rank));
    const std::chrono::microseconds took{std::stoll(std::string(bytes.begin(), bytes.end()))};
    longest = std::max(longest, took);
  }
  return longest;
}

TEST(StoreWorlds, FormOverTheStoreOfTheirCreators) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = std::chrono::seconds(60);
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  Processes ranks;
  for (int rank = 0; rank < kSizes.back(); ++rank) {
    std::vector<std::string> words{TFT_STORE_RANK, std::to_string(store->getPort()),
                                   std::to_string(rank)};
    for (const int size : kSizes) words.push_back(std::to_string(size));
    ranks.start(std::move(words));
  }
  ASSERT_TRUE(ranks.endWell(Deadline::after(kEndsWithin)));
  for (const int size : kSizes) {
    const auto took = slowest(*store, size);
    EXPECT_LT(took, kFormsWithin) << "a world of " << size;
    RecordProperty("took_us_" + std::to_string(size), std::to_string(took.count()));
    std::printf("a world of %d formed in %.0f ms\n", size,
                static_cast<double>(took.count()) / 1000);
  }
}

}  // namespace
}  // namespace torchft_ext
