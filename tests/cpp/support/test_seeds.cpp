#include "cpp/support/test_seeds.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace torchft_ext {
namespace {

uint32_t numberFrom(const char* variable, uint32_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
}

}  // namespace

uint32_t testSeed() {
  const uint32_t seed = numberFrom("TORCHFT_EXT_TEST_SEED", 1);
  std::cout << "TORCHFT_EXT_TEST_SEED=" << seed << std::endl;  // stands there even after a crash
  return seed;
}

uint32_t testProcesses(uint32_t otherwise) {
  return numberFrom("TORCHFT_EXT_TEST_PROCESSES", otherwise);
}

void forSeeds(uint32_t count, const std::function<void(uint32_t seed)>& run) {
  const uint32_t first = testSeed();
  const uint32_t seeds = numberFrom("TORCHFT_EXT_TEST_SEEDS", count);
  for (uint32_t seed = first; seed != first + seeds; ++seed) {
    SCOPED_TRACE("TORCHFT_EXT_TEST_SEED=" + std::to_string(seed));
    run(seed);
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace torchft_ext
