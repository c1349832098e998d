#!/usr/bin/env bash
# Compiles and links everything against another torch than the one installed, which may be a CUDA wheel, and unoptimised.
# Of that the C++ tests of groups and DDP on libtorch run, and a program that loads that CUDA runtime.
#   scripts/check_other_torch.sh [--cuda] [--build] 2.11.0 [DIRECTORY for the wheel's headers and libraries]
# --cuda: fails where the wheel is one for the CPU, against which the files that call CUDA and NCCL are left out.
# --build: runs no C++ tests.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

wants_cuda=
build=
while :; do
  case ${1:-} in
    --cuda) wants_cuda=yes ;;
    --build) build=only ;;
    *) break ;;
  esac
  shift
done
version=${1:?usage: scripts/check_other_torch.sh [--cuda] [--build] VERSION [DIRECTORY]}
where=$(realpath -m "${2:-$BUILD_ROOT/torch-$version}")

if [ ! -f "$where/unpacked" ]; then
  rm -rf "$where"
  mkdir -p "$where"
  say "downloading torch $version"
  lift_caps_on_torch "$version" "$where/constraints.txt"
  retry python -m pip download --quiet --retries 10 --no-deps --dest "$where" "torch==$version"
  python - "$where" <<'PY'
import pathlib, sys, zipfile

where = pathlib.Path(sys.argv[1])
(wheel,) = where.glob("torch-*.whl")
libraries = {f"torch/lib/lib{name}.so" for name in ("c10", "c10_cuda", "torch", "torch_cpu", "torch_python")}
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith("torch/include/") or name in libraries | {"torch/version.py"}:
            archive.extract(name, where)
wheel.unlink()
PY
  touch "$where/unpacked"
fi

cuda=$(python -c 'import runpy, sys; print(runpy.run_path(sys.argv[1])["cuda"] or "")' "$where/torch/version.py")
say "torch $version for ${cuda:+CUDA $cuda}$([ -n "$cuda" ] || echo the CPU)"
if [ -n "$wants_cuda" ] && [ -z "$cuda" ]; then
  die "torch $version from this index is a wheel for the CPU: expected one for CUDA"
fi
if [ -n "$cuda" ]; then # what is looked up at run time, by names that no compiler checks
  library="$where/torch/lib/libc10_cuda.so"
  symbol=$(sed -n 's/.*kStreamOf = "\(.*\)";/\1/p' csrc/nccl/cuda_runtime.cpp)
  nm -D --defined-only "$library" | grep " T ${symbol:?}\$" >/dev/null || die "$library does not export $symbol"
  readelf -d "$library" | grep 'NEEDED.*libcudart' >/dev/null || die "$library does not bring the CUDA runtime along"
  say "libc10_cuda.so exports $symbol and brings libcudart along"
fi

# What torch's libraries need of CUDA where none of it is used: two wheels of some megabytes.
take_cuda_libraries() {
  local name suffix=
  [ "${cuda%%.*}" -ge 13 ] || suffix=-cu${cuda%%.*}
  for name in runtime cupti; do
    retry python -m pip download --quiet --retries 10 --no-deps --dest "$where/cuda" "nvidia-cuda-$name$suffix==$cuda.*"
  done
  for name in "$where"/cuda/*.whl; do python -m zipfile -e "$name" "$where/cuda" && rm "$name"; done
  touch "$where/cuda/unpacked"
}
library_path=
if [ -n "$cuda" ]; then
  [ -f "$where/cuda/unpacked" ] || take_cuda_libraries
  library_path=$(find "$where/cuda" \( -name 'libcudart.so.*' -o -name 'libcupti.so.*' \) -printf '%h\n' | sort -u | paste -sd:)
fi

load_cuda_runtime() {
  local program
  program=$(mktemp "$BUILD_ROOT/real_cuda_runtime.XXXXXX")
  "${CXX:-g++}" -std=c++20 -Wall -Wextra -Werror -Icsrc -Icsrc/include -isystem "$where/torch/include" \
    tests/nccl/real_cuda_runtime.cpp csrc/nccl/cuda_{runtime,ipc}.cpp csrc/device/{on_device,devices_end}.cpp csrc/base/*.cpp -o "$program" \
    -L"$where/torch/lib" -Wl,-rpath,"$where/torch/lib" -lc10 -ldl
  LD_LIBRARY_PATH=$library_path "$program" "$library"
  rm "$program"
}
[ -z "$cuda" ] || load_cuda_runtime

directory="$BUILD_ROOT/with-torch-$version"
CXX=$(checking_compiler) configure "$directory" -DTORCHFT_EXT_TORCH_DIR="$where/torch" -DTORCHFT_EXT_OPTIMIZE=-O0 \
  >"$directory.log" 2>&1 || { cat "$directory.log"; exit 1; }
cmake --build "$directory" -j "$JOBS" --target all torchft_ext_checks

[ -z "$build" ] || exit 0
say "C++ programs on libtorch $version"
# Without the comparison with Python, whose torch is another one here.
LD_LIBRARY_PATH=$library_path "$directory/tests/cpp/torchft_ext_libtorch_tests" --gtest_filter='-*Python*'
