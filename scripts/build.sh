#!/usr/bin/env bash
# Builds in place and installs torchft_ext into $VENV as an editable package.
#   scripts/build.sh          the Python package
#   scripts/build.sh --tests  and the C++ tests and native benchmarks, in $TORCHFT_EXT_BUILD_ROOT/dev
#   scripts/build.sh --python-tests  and no more of those than the Python tests run; `ninja -C $TORCHFT_EXT_BUILD_ROOT/dev`
#                             compiles the others
# TORCHFT_EXT_CMAKE_ARGS: more options of CMake.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tests=$([ "${1:-}" = --tests ] && echo ON || echo OFF)
export TORCHFT_EXT_BUILD_DIR="$BUILD_ROOT/dev"
export TORCHFT_EXT_CMAKE_ARGS="-DTORCHFT_EXT_BUILD_TESTS=$tests -DTORCHFT_EXT_BUILD_BENCHMARKS=$tests -DTORCHFT_EXT_WERROR=$WERROR ${TORCHFT_EXT_CMAKE_ARGS:-}"

# pip only where what it records has changed; otherwise just compile what is new.
stamp="$VENV/.installed-$(cat setup.py pyproject.toml <(echo "$ROOT") | sha256sum | cut -c1-16)"
if [ -f "$stamp" ]; then
  command=(python setup.py --quiet build_ext --inplace)
else
  command=(python -m pip install --verbose --no-build-isolation --no-deps --editable .)
fi

mkdir -p "$BUILD_ROOT"
log="$BUILD_ROOT/build.log"
say "building torchft_ext (a few minutes the first time; log: $log)"
if ! "${command[@]}" >"$log" 2>&1; then
  grep -E -A30 'error:|FAILED|torchft_ext:' "$log" | head -150 >&2 || tail -40 "$log" >&2
  die "the build failed; its whole log: $log"
fi
tell_warnings "$log"
rm -f "$VENV"/.installed-*
touch "$stamp"
[ "${1:-}" = --python-tests ] || exit 0

log="$BUILD_ROOT/python-tests.log"
{ cmake -S . -B "$BUILD_ROOT/dev" -DTORCHFT_EXT_BUILD_TESTS=ON -DTORCHFT_EXT_BUILD_BENCHMARKS=ON &&
  cmake --build "$BUILD_ROOT/dev" -j "$JOBS" --target torchft_ext_for_python_tests; } >"$log" 2>&1 ||
  { tail -40 "$log" >&2; die "the build of what the Python tests run failed; its whole log: $log"; }
