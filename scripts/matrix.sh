#!/usr/bin/env bash
# The failure matrix (tests/matrix) on ranks built here. Arguments go to it:
#   scripts/matrix.sh                       every case: about half an hour on two cores
#   scripts/matrix.sh --done FILE           the same, and goes on where it was interrupted
#   scripts/matrix.sh --shard 2/4           one of four parts
#   scripts/matrix.sh --sample --minutes 3  a random part that holds every value of every axis
#   scripts/matrix.sh --built --sample --minutes 0 --scale 3
#                                           as CI does: no more than that, on ranks that are built already (must
#                                           come first); --scale: factor on all bounds of time
#   scripts/matrix.sh --strangers 10000     hostile connections against a live generation
#   scripts/matrix.sh --sanitize thread --world 4 --sample --minutes 3
#                                           ranks under a sanitizer (must come first); all bounds x 10
# All arguments: PYTHONPATH=tests python -m matrix --help
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [ "${1:-}" != --sanitize ]; then
  if [ "${1:-}" = --built ]; then shift; else scripts/build.sh --tests; fi
  PYTHONPATH=tests exec python -m matrix --rank "$BUILD_ROOT/dev/tests/cpp/torchft_ext_rank" "$@"
fi

sanitizer_setup "${2:-}"
shift 2
cmake --build "$directory" -j "$JOBS" --target torchft_ext_rank
# Ranks are killed and their stderr is nobody's: what a sanitizer finds goes to files. ThreadSanitizer would let an
# exiting process linger for a second.
reports="$directory/matrix-reports"
rm -rf "$reports"
mkdir -p "$reports"
export ASAN_OPTIONS="$ASAN_OPTIONS:log_path=$reports/rank" TSAN_OPTIONS="$TSAN_OPTIONS:atexit_sleep_ms=0:log_path=$reports/rank" \
  UBSAN_OPTIONS="$UBSAN_OPTIONS:log_path=$reports/rank"
status=0
PYTHONPATH=tests "${unrandomised[@]}" python -m matrix --rank "$directory/tests/cpp/torchft_ext_rank" --scale 10 "$@" || status=$?
found=$(find "$reports" -type f | wc -l)
[ "$found" = 0 ] || { cat "$reports"/*; die "the sanitizer reported in $found ranks: $reports"; }
exit "$status"
