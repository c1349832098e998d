#!/usr/bin/env bash
# The C++ tests and the example programs in C++ and C under sanitizers, each sanitizer in a build directory of its own.
#   scripts/sanitize.sh address   AddressSanitizer, LeakSanitizer, UndefinedBehaviorSanitizer
#   scripts/sanitize.sh thread    ThreadSanitizer
#   scripts/sanitize.sh thread --build    compiles alone
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

sanitizer_setup "${1:-}"
cmake --build "$directory" -j "$JOBS" --target torchft_ext_checks
[ "${2:-}" != --build ] || exit 0
run_ctest "$directory" "${unrandomised[@]}"
