// The seeds of randomised tests:
//
//   TORCHFT_EXT_TEST_SEED=123     replays that one; tests of many seeds begin with it
//   TORCHFT_EXT_TEST_SEEDS=5000   so many, in tests of many
//   TORCHFT_EXT_TEST_PROCESSES=64 so many in each of the monitor's random schedules
//
// They print a digest of what was told, to whom and when: code that judges as before leaves it as
// it was.
#pragma once

#include <cstdint>
#include <functional>

namespace torchft_ext {

// Under AddressSanitizer and ThreadSanitizer a simulation takes ten times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

// The one to begin with: as the environment says, else 1, so that a change is judged by the same
// schedules as the one before it. New ones are looked for with seeds and numbers of one's own.
// Printed.
uint32_t testSeed();
uint32_t testProcesses(uint32_t otherwise);
// So many seeds, unless the environment says how many; ends with the first that fails a test, and
// names that one.
void forSeeds(uint32_t count, const std::function<void(uint32_t seed)>& run);

}  // namespace torchft_ext
