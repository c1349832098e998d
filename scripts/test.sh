#!/usr/bin/env bash
# Builds, then runs the C++ tests and the Python tests.
#   scripts/test.sh                       all of them
#   scripts/test.sh PYTEST ARGUMENT...    those Python tests alone: -k name, or tests/python/group/test_names.py
# Where the C++ tests were never compiled, which takes minutes, they come last: they compile beside the Python tests, on
# what those leave idle of the cores.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

run_cpp_tests() { run_ctest "$BUILD_ROOT/dev"; }
# They wait half of their time: two files at a time, then those that need the machine for themselves. Which files a process
# runs, and after which others, differs from run to run.
run_python_tests() {
  if ! python -m pytest tests/python -n 2 --dist loadfile -m 'not alone'; then
    repeated Python
    python -m pytest tests/python -m 'not alone' --last-failed --last-failed-no-failures none || failed+=("Python tests")
  fi
  python -m pytest tests/python -m alone || failed+=("Python tests that run alone")
  # Within one host the others go through shared memory.
  TORCHFT_EXT_SHARED_MEMORY=0 python -m pytest tests/python/operations -n 2 --dist loadfile -m 'not alone' ||
    failed+=("Python tests over sockets")
}
# Each part runs, whatever the others found.
failed=()
report() {
  [ ${#failed[@]} = 0 ] || die "failed: $(printf '%s; ' "${failed[@]}")see above"
}

if [ $# -gt 0 ]; then
  scripts/build.sh --python-tests
  tests=(tests/python)
  for argument in "$@"; do
    case $argument in tests/*) tests=() ;; esac
  done
  exec python -m pytest "${tests[@]}" "$@"
fi

if [ -x "$BUILD_ROOT/dev/tests/cpp/torchft_ext_tests" ]; then
  scripts/build.sh --tests
  run_cpp_tests || failed+=("C++ tests")
  run_python_tests
  report
  exit
fi

scripts/build.sh --python-tests
log="$BUILD_ROOT/cpp-tests.log"
say "compiling the C++ tests beside the Python tests (log: $log)"
chrt --idle 0 cmake --build "$BUILD_ROOT/dev" -j "$JOBS" --target torchft_ext_checks >"$log" 2>&1 &
compiling=$!
trap 'kill "$compiling" 2>/dev/null || true' EXIT
run_python_tests
chrt --other --pid 0 "$compiling" 2>/dev/null || true # nothing to leave anything idle any more
wait "$compiling" || { tail -60 "$log" >&2; die "the C++ tests do not compile; the whole log: $log"; }
tell_warnings "$log"
run_cpp_tests || failed+=("C++ tests")
report
