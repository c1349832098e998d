#!/usr/bin/env bash
# The device tests on the simulated device with NCCL's own library under it (tests/nccl_host), on x86-64. Takes NCCL and
# CUDA's headers from their wheels, and keeps them. On what scripts/build.sh --tests has built.
#   scripts/nccl_host.sh                            the device tests
#   scripts/nccl_host.sh tests/python/device/test_device_aborts.py --ranks 2
#                                                   arguments for pytest instead of all those files
#   scripts/nccl_host.sh --version 2.28.7 [...]     another NCCL (default 2.28.9; must come first)
#   scripts/nccl_host.sh --build [--version ...]    no tests: what they need, made anew where it is older than its sources
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

version=2.28.9
only_build=
while [ $# -gt 0 ]; do
  case $1 in
    --build) only_build=yes ;;
    --version)
      version=${2:?--version: which?}
      shift
      ;;
    *) break ;;
  esac
  shift
done

[ "$(uname -m)" = x86_64 ] ||
  die "this is $(uname -m): functions of NCCL's library are overwritten with jumps, which are written for x86-64 only"
sim="$BUILD_ROOT/dev/tests/sim/libtorchft_ext_sim.so"
core="$BUILD_ROOT/dev/libtorchft_ext_core.so"
for built in "$VENV/bin/python" "$sim" "$core"; do
  [ -f "$built" ] || die "there is no $built: run scripts/setup.sh --tests, then scripts/build.sh --tests"
done
work="$BUILD_ROOT/nccl_host"
library="$work/libtorchft_ext_nccl_host.so"
nccl="$work/nccl-$version/nvidia/nccl/lib/libnccl.so.2"

# unpack DIRECTORY PREFIX WHEEL...: of the wheels, the files whose names begin so; once for these wheels.
unpack() {
  local where=$1 prefix=$2
  shift 2
  if [ -f "$where/unpacked" ] && [ "$(cat "$where/unpacked")" = "$*" ]; then return; fi
  rm -rf "$where"
  mkdir -p "$where"
  say "downloading $*"
  retry python -m pip download --quiet --retries 10 --no-deps --dest "$where" "$@"
  python - "$where" "$prefix" <<'PY'
import pathlib, sys, zipfile

where, prefix = pathlib.Path(sys.argv[1]), sys.argv[2]
for wheel in where.glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(prefix)]
        if not names:
            sys.exit(f"{wheel.name} has no {prefix}")
        archive.extractall(where, names)
    wheel.unlink()
PY
  echo "$*" >"$where/unpacked"
}

# ninja compiles anew whose sources, headers or flags have changed.
write_build_file() {
  local torch source object objects=()
  torch=$(python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
  cat <<NINJA
builddir = $work
rule compile
  command = ${CXX:-g++} -std=c++20 -O1 -g -fPIC -DNDEBUG -D_GLIBCXX_USE_CXX11_ABI=1 $
    -Wall -Wextra -Werror -Wno-deprecated-declarations -Icsrc -Icsrc/include -Itests/sim $
    -isystem $torch/include -isystem $torch/include/torch/csrc/api/include -isystem $work/cuda/nvidia/cu13/include $
    -MMD -MF \$out.d -c \$in -o \$out
  description = compiling \$in
  depfile = \$out.d
  deps = gcc
rule link
  command = ${CXX:-g++} -shared \$in -o \$out $sim $core -L$torch/lib -ltorch_cpu -lc10 -ldl -pthread $
    -Wl,--allow-shlib-undefined -Wl,-rpath,$(dirname "$sim"):$(dirname "$core"):$torch/lib
  description = linking \$out
NINJA
  for source in tests/nccl_host/*.cpp; do
    object="$work/objects/$(basename "$source" .cpp).o"
    objects+=("$object")
    echo "build $object: compile $source | $torch/version.py $work/cuda/unpacked"
  done
  echo "build $library: link ${objects[*]} | $sim $core"
}

unpack "$work/nccl-$version" nvidia/nccl/lib/libnccl.so.2 "nvidia-nccl-cu13==$version"
unpack "$work/cuda" nvidia/cu13/include/ "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*"
write_build_file >"$work/build.ninja"
ninja --quiet -f "$work/build.ninja" -j "$JOBS"
if [ -n "$only_build" ]; then
  say "$library"
  exit 0
fi

ran=$(python - "$nccl" <<'PY'
import ctypes, sys

number = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
print(f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}")
PY
)
export TORCHFT_EXT_TEST_DEVICE=privateuseone TORCHFT_EXT_TEST_NCCL_HOST="$library" TORCHFT_EXT_NCCL_LIB="$nccl" \
  TORCHFT_EXT_SIM_LIB="$sim" TORCHFT_EXT_BUILD_ROOT="$BUILD_ROOT"
[ $# -gt 0 ] || set -- \
  tests/python/device/test_device_{collectives,dtypes,order,works,batches,arguments,aborts,failures,matrix,training,frameworks,wrappers,subgroups,memory_pools,streams,names,nan_check}.py
status=0
python -m pytest -q -p no:cacheprovider "$@" || status=$?
say "NCCL under these tests: $ran, as its wheel has it"
exit "$status"
