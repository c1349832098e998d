#!/usr/bin/env bash
# Builds the package against a torch of this version, in an environment and a copy of the tree of its own, and runs the
# Python tests and the C++ tests of groups and DDP on libtorch there. A CUDA wheel of torch takes some 6 GB, and runs on the CPU too.
#   scripts/check_torch.sh 2.15.0                       the whole Python suite
#   scripts/check_torch.sh --quick 2.14.1               the tests of reconfigure, generations, names, failures and of FSDP2
#   scripts/check_torch.sh 2.11.0 tests/python/process/test_gil.py -x
#                                                       these arguments of pytest, instead of the whole suite
#   scripts/check_torch.sh --build --quick 2.14.1       only makes what those tests need
#   scripts/check_torch.sh --package 2.14.1             only makes the package, for another script's environment
# Works in $TORCHFT_EXT_BUILD_ROOT/run-torch-VERSION, and goes on from what an earlier run left there (delete the
# directory to begin afresh). PYTHON chooses the interpreter: a version of torch may have no wheel for each.
# scripts/check_other_torch.sh compiles all C++ tests, and needs the smallest of the CUDA packages alone.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

quick=(tests/python/{group/test_{reconfigure,generations,names},failures/test_failures,process_group/test_process_group_mesh}.py)
tests=(tests/python)
build=
if [ "${1:-}" = --build ] || [ "${1:-}" = --package ]; then
  build=${1#--}
  shift
fi
if [ "${1:-}" = --quick ]; then
  tests=("${quick[@]}")
  shift
fi
version=${1:?usage: scripts/check_torch.sh [--build | --package] [--quick] VERSION [PYTEST ARGUMENT...]}
shift
# Words of which one names a test replace the choice; options alone (-x) are added to it.
for argument in "$@"; do
  case $argument in tests/*) tests=() ;; esac
done

work="$BUILD_ROOT/run-torch-$version"
mkdir -p "$work"
# A copy: what is built in place here stays as it is. Files keep their times, so that nothing is compiled twice.
find "$work" -mindepth 1 -maxdepth 1 ! -name .venv ! -name build ! -name '*.egg-info' -exec rm -rf {} +
git ls-files --cached --others --exclude-standard -z |
  while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
  tar --create --null --files-from=- | tar --extract --directory "$work"

cd "$work"
export VENV="$work/.venv" TORCHFT_EXT_BUILD_ROOT="$work/build" TORCH_VERSION="$version" PATH="$work/.venv/bin:$PATH"
lift_caps_on_torch "$version" "$work/constraints.txt"
scripts/setup.sh --tests
# To be checked, not to be fast.
export TORCHFT_EXT_CMAKE_ARGS="-DTORCHFT_EXT_OPTIMIZE=-O1"
CXX=$(checking_compiler) scripts/build.sh
found=$(python -c 'import torch; print(torch.__version__)')
case $found in "$version" | "$version"+*) ;; *) die "expected torch $version in $VENV, found $found" ;; esac
[ "$build" != package ] || exit 0
# Of the C++ tests, those of what libtorch's programs use; and what Python tests run.
targets=(torchft_ext_libtorch_tests)
[ "${tests[*]:-}" = "${quick[*]}" ] || targets+=(torchft_ext_for_python_tests)
cmake -S . -B build/dev -DTORCHFT_EXT_BUILD_TESTS=ON -DTORCHFT_EXT_BUILD_BENCHMARKS=ON >build/cpp-tests.log
cmake --build build/dev -j "$JOBS" --target "${targets[@]}" >>build/cpp-tests.log

[ -z "$build" ] || exit 0
say "torch $found, $(python --version), $(date +%F): C++ programs on libtorch, ${tests[*]} $*"
build/dev/tests/cpp/torchft_ext_libtorch_tests
CUDA_VISIBLE_DEVICES='' python -m pytest "${tests[@]}" "$@"
