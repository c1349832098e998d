#!/usr/bin/env bash
# Clang's thread-safety analysis over all our C++, and clang-tidy over what does not include torch.
#   scripts/tidy.sh [FILE...]   default: everything under csrc
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

have clang++ || die "clang++ not found: run scripts/setup.sh --all"
have clang-tidy || die "clang-tidy not found: run scripts/setup.sh --all"
torch_dir=$(python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
python_include=$(python -c "import sysconfig; print(sysconfig.get_path('include'))")
export own_flags="-std=c++20 -Icsrc -Icsrc/include -Wall -Wextra -Wthread-safety"
export torch_flags="-isystem $torch_dir/include -isystem $torch_dir/include/torch/csrc/api/include \
  -isystem $python_include -D_GLIBCXX_USE_CXX11_ABI=1 -DNDEBUG"

# What nearly every file of those that see torch reads first, read once.
mkdir -p "$BUILD_ROOT"
export precompiled="$BUILD_ROOT/tidy.pch"
printf '#include <%s>\n' ATen/ATen.h torch/csrc/distributed/c10d/ProcessGroup.hpp |
  clang++ -x c++-header $own_flags $torch_flags -Wno-attributes -o "$precompiled" -

analyse() {
  local file=$1 status=0
  # shellcheck disable=SC2086
  case $file in
    csrc/c10d/* | csrc/python/*)
      clang++ -fsyntax-only -Werror $own_flags $torch_flags -Wno-attributes -include-pch "$precompiled" "$file" || status=1
      ;;
    csrc/nccl/* | csrc/host/reduce.cpp)
      clang++ -fsyntax-only -Werror $own_flags $torch_flags -Wno-attributes "$file" || status=1
      ;;
    *)
      clang-tidy --quiet "$file" -- $own_flags 2>/dev/null || status=1 # the compiler's own warnings among its checks
      ;;
  esac
  [ "$status" = 0 ] || echo "tidy: $file has findings"
  return "$status"
}
export -f analyse

if [ $# -gt 0 ]; then files=("$@"); else mapfile -t files < <(find csrc -name '*.cpp' | sort); fi
[ ${#files[@]} -gt 0 ] || die "no C++ files"
# xargs turns any failure into 123; every file is looked at all the same.
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$JOBS" bash -c 'analyse "$1"' _
echo "${#files[@]} files analysed, no findings"
