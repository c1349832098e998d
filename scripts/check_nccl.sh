#!/usr/bin/env bash
# Whether NCCL is as csrc/nccl takes it to be: its header's declarations, and the library itself as far as it goes
# without a GPU; and what csrc/nccl declares of CUDA between processes. Takes NCCL, and CUDA's headers, from their wheels.
#   scripts/check_nccl.sh [VERSION...]   default 2.18.3 2.28.9 2.32.3: about the oldest that is supported, the one of
#                                        torch 2.11.0, and a late one
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ $# -gt 0 ] || set -- 2.18.3 2.28.9 2.32.3
mkdir -p "$BUILD_ROOT"
work=$(mktemp -d "$BUILD_ROOT/nccl.XXXXXX")
trap 'rm -rf "$work"' EXIT
own_flags=(-std=c++20 -Wall -Wextra -Werror -Icsrc -Icsrc/include)
"${CXX:-g++}" "${own_flags[@]}" tests/nccl/real_library.cpp csrc/nccl/{nccl_library,nccl_entry_points,nccl_types,root_release}.cpp \
  -o "$work/real_library" -ldl -pthread

unpack() { # VERSION: nccl.h and the library
  local cuda=cu12
  # Since 2.27.7 there are wheels for CUDA 13.
  if [ "$(printf '%s\n' "$1" 2.27.7 | sort -V | head -n 1)" = 2.27.7 ]; then cuda=cu13; fi
  retry python -m pip download --quiet --retries 10 --no-deps --dest "$work/$1" "nvidia-nccl-$cuda==$1"
  python - "$work/$1" <<'PY'
import pathlib, sys, zipfile

where = pathlib.Path(sys.argv[1])
(wheel,) = where.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in ("nvidia/nccl/include/nccl.h", "nvidia/nccl/lib/libnccl.so.2"):
        archive.extract(name, where)
wheel.unlink()
PY
}

for package in nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88; do
  retry python -m pip download --quiet --retries 10 --no-deps --dest "$work/cuda" "$package"
done
python -c 'import pathlib, sys, zipfile
for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    zipfile.ZipFile(wheel).extractall(sys.argv[1])' "$work/cuda"
torch=$(python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
"${CXX:-g++}" "${own_flags[@]}" -isystem "$torch/include" -isystem "$work/cuda/nvidia/cu13/include" -fsyntax-only \
  tests/nccl/cuda_declarations.cpp
say "CUDA's functions between processes are declared as in its headers"

for version in "$@"; do
  unpack "$version"
  nccl="$work/$version/nvidia/nccl"
  "${CXX:-g++}" "${own_flags[@]}" -isystem tests/nccl/cuda -isystem "$nccl/include" -fsyntax-only tests/nccl/declarations.cpp
  IFS=. read -r major minor patch <<<"$version"
  TORCHFT_EXT_NCCL_LIB="$nccl/lib/libnccl.so.2" NCCL_SOCKET_IFNAME=lo timeout 120 \
    "$work/real_library" $((major * 10000 + minor * 100 + patch))
  rm -rf "${work:?}/$version"
done
