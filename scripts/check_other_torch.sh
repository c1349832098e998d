#!/usr/bin/env bash
# Compiles and links everything against another torch than the one installed, which may be a CUDA wheel: of what it
# compiles nothing runs but a program that loads that CUDA runtime, and nothing is optimised.
#   scripts/check_other_torch.sh [--cuda] 2.11.0 [DIRECTORY for the wheel's headers and libraries]
# --cuda: fails where the wheel is one for the CPU, against which the files that call CUDA and NCCL are left out.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

wants_cuda=
if [ "${1:-}" = --cuda ]; then
  wants_cuda=yes
  shift
fi
version=${1:?usage: scripts/check_other_torch.sh [--cuda] VERSION [DIRECTORY]}
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

# The CUDA runtime is a wheel of its own, of some megabytes.
load_cuda_runtime() {
  local work name
  work=$(mktemp -d "$BUILD_ROOT/cuda-runtime.XXXXXX")
  if [ "${cuda%%.*}" -ge 13 ]; then name=nvidia-cuda-runtime; else name=nvidia-cuda-runtime-cu${cuda%%.*}; fi
  retry python -m pip download --quiet --retries 10 --no-deps --dest "$work" "$name==$cuda.*"
  python -m zipfile -e "$work"/*.whl "$work"
  "${CXX:-g++}" -std=c++20 -Wall -Wextra -Werror -Icsrc -Icsrc/include -isystem "$where/torch/include" \
    tests/nccl/real_cuda_runtime.cpp csrc/nccl/cuda_runtime.cpp -o "$work/real_cuda_runtime" \
    -L"$where/torch/lib" -Wl,-rpath,"$where/torch/lib" -lc10 -ldl
  LD_LIBRARY_PATH=$(dirname "$(find "$work" -name 'libcudart.so.*')") "$work/real_cuda_runtime" "$library"
  rm -rf "$work"
}
[ -z "$cuda" ] || load_cuda_runtime

directory="$BUILD_ROOT/with-torch-$version"
CXX=$(checking_compiler) configure "$directory" -DTORCHFT_EXT_TORCH_DIR="$where/torch" -DTORCHFT_EXT_OPTIMIZE=-O0 \
  -DTORCHFT_EXT_PRECOMPILE=ON >"$directory.log" 2>&1 || { cat "$directory.log"; exit 1; }
cmake --build "$directory" -j "$JOBS"
