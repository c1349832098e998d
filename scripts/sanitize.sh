#!/usr/bin/env bash
# The C++ tests under sanitizers, each in a build directory of its own.
#   scripts/sanitize.sh address   AddressSanitizer, LeakSanitizer, UndefinedBehaviorSanitizer
#   scripts/sanitize.sh thread    ThreadSanitizer
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  address) sanitizers=address,undefined ;;
  thread) sanitizers=thread ;;
  *) die "usage: scripts/sanitize.sh address|thread" ;;
esac
directory="$BUILD_ROOT/$1-sanitizer"
configure "$directory" -DTORCHFT_EXT_BUILD_PYTHON=OFF -DTORCHFT_EXT_SANITIZE=$sanitizers -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
  >"$directory.log" 2>&1 || { cat "$directory.log"; exit 1; }
cmake --build "$directory" -j "$JOBS"

# The suppressions name torch's own libraries and nothing of ours.
supp="$ROOT/scripts/suppressions"
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
export LSAN_OPTIONS="suppressions=$supp/lsan.supp:print_suppressions=0${LSAN_OPTIONS:+:$LSAN_OPTIONS}"
export UBSAN_OPTIONS="print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
export TSAN_OPTIONS="suppressions=$supp/tsan.supp:second_deadlock_stack=1:history_size=4${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
export OMP_NUM_THREADS=1 # libgomp is not built for ThreadSanitizer

# ThreadSanitizer of older compilers cannot place its shadow memory under strong address randomisation.
run=()
if setarch "$(uname -m)" -R true 2>/dev/null; then run=(setarch "$(uname -m)" -R); fi
"${run[@]}" ctest --test-dir "$directory" --output-on-failure --no-tests=error -j "$JOBS"
