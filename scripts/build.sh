#!/usr/bin/env bash
# Builds in place and installs torchft_ext into $VENV as an editable package.
#   scripts/build.sh                 the Python package
#   scripts/build.sh --python-tests  and what the Python tests run: the simulated device, native benchmarks
#   scripts/build.sh --tests         and the C++ tests and native benchmarks, in $TORCHFT_EXT_BUILD_ROOT/dev
# TORCHFT_EXT_CMAKE_ARGS: more options of CMake.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case "${1:-}" in
  '') checks= targets=() ;;
  --python-tests) checks=ON targets=(torchft_ext_for_python_tests) ;;
  --tests) checks=ON targets=(torchft_ext_checks) ;;
  *) die "usage: scripts/build.sh [--tests | --python-tests]" ;;
esac
export TORCHFT_EXT_BUILD_DIR="$BUILD_ROOT/dev"
export TORCHFT_EXT_CMAKE_ARGS="${checks:+-DTORCHFT_EXT_BUILD_TESTS=ON -DTORCHFT_EXT_BUILD_BENCHMARKS=ON} -DTORCHFT_EXT_WERROR=$WERROR ${TORCHFT_EXT_CMAKE_ARGS:-}"

# pip only where what it records has changed; otherwise just compile what is new.
stamp="$VENV/.installed-$(cat setup.py pyproject.toml <(echo "$ROOT") | sha256sum | cut -c1-16)"
if [ -f "$stamp" ]; then
  command=(python setup.py --quiet build_ext --inplace)
else
  command=(python -m pip install --verbose --no-build-isolation --no-deps --editable .)
fi

build() {
  "${command[@]}" || return
  [ ${#targets[@]} = 0 ] || cmake --build "$TORCHFT_EXT_BUILD_DIR" -j "$JOBS" --target "${targets[@]}"
}

mkdir -p "$BUILD_ROOT"
log="$BUILD_ROOT/build.log"
say "building torchft_ext (a few minutes the first time; log: $log)"
if ! build >"$log" 2>&1; then
  grep -E -A30 'error:|FAILED|torchft_ext:' "$log" | head -150 >&2 || tail -40 "$log" >&2
  die "the build failed; its whole log: $log"
fi
tell_warnings "$log"
rm -f "$VENV"/.installed-*
touch "$stamp"
