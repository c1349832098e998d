#!/usr/bin/env bash
# clang-tidy over all our C++, and in the same pass clang's warnings and its thread-safety analysis, as errors.
#   scripts/tidy.sh [FILE...]    default: everything under csrc
#   scripts/tidy.sh --part I/N   the I-th of N parts of it, from 1: N runs look at everything
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# The environment's own, which brings its compiler's headers along; never one of the machine's, which is another version.
export tidy="$VENV/bin/clang-tidy"
[ -x "$tidy" ] || die "no clang-tidy in $VENV: run scripts/setup.sh, which installs requirements-dev.txt"
torch_dir=$(python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
python_include=$(python -c "import sysconfig; print(sysconfig.get_path('include'))")
# The static analyzer stops at so many states of one function, a tenth of its default: docs/decisions.md.
export own_flags="-std=c++20 -Icsrc -Icsrc/include -Wall -Wextra -Wthread-safety -Wexit-time-destructors -DTORCHFT_EXT_VERSION=\"0\" -Xclang -analyzer-config -Xclang max-nodes=20000"
export torch_flags="-isystem $torch_dir/include -isystem $torch_dir/include/torch/csrc/api/include \
  -isystem $python_include -D_GLIBCXX_USE_CXX11_ABI=1 -DNDEBUG"

analyse() {
  local file=$1 status=0
  # shellcheck disable=SC2086
  case $file in
    csrc/c10d/* | csrc/device/* | csrc/device_child/* | csrc/engines/* | csrc/nccl/* | csrc/staged/* | csrc/libtorch/* | csrc/python/*) # what sees torch
      "$tidy" --quiet "$file" -- $own_flags $torch_flags || status=1
      ;;
    *) "$tidy" --quiet "$file" -- $own_flags || status=1 ;;
  esac
  [ "$status" = 0 ] || echo "tidy: $file has findings"
  return "$status"
}
export -f analyse

# The docstrings of the bindings, as the build makes them.
generated=$(mktemp -d)
trap 'rm -rf "$generated"' EXIT
python scripts/make_docstrings.py torchft_ext/_C.pyi "$generated/python/docstrings.h"
own_flags="$own_flags -I$generated"

# A guarded field that is read without its lock. Where that passes, the analysis is off and says nothing of the files below.
probe=$(mktemp -d)
trap 'rm -rf "$generated" "$probe"' EXIT
cat >"$probe/unguarded.cpp" <<'CPP'
#include "base/mutex.h"

struct Unguarded {
  int read() { return field; }
  torchft_ext::Mutex mutex;
  int field GUARDED_BY(mutex) = 0;
};
CPP
status=0
# shellcheck disable=SC2086
found=$("$tidy" --quiet --config-file=.clang-tidy "$probe/unguarded.cpp" -- $own_flags 2>&1) || status=$?
if [ "$status" = 0 ] || ! grep -q "error: reading variable 'field' requires holding mutex 'mutex'" <<<"$found"; then
  die "the thread-safety analysis is off: it lets a guarded field be read without its lock
$found"
fi

# in_part I N: of the names on stdin those that fall to this part, by what they are called: a new file moves no other.
in_part() {
  local file sum
  while read -r file; do
    sum=$(cksum <<<"$file")
    [ $((${sum%% *} % $2 + 1)) != "$1" ] || echo "$file"
  done
}

case "${1:-}" in
  --part)
    [[ "${2:-}" =~ ^([1-9][0-9]*)/([1-9][0-9]*)$ ]] && [ "${BASH_REMATCH[1]}" -le "${BASH_REMATCH[2]}" ] ||
      die "--part: expected I/N with I from 1 to N, found '${2:-}'"
    mapfile -t files < <(find csrc -name '*.cpp' | sort | in_part "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}")
    ;;
  '') mapfile -t files < <(find csrc -name '*.cpp' | sort) ;;
  *) files=("$@") ;;
esac
[ ${#files[@]} -gt 0 ] || die "no C++ files"
"$tidy" --version | grep version
# xargs turns any failure into 123; every file is looked at all the same.
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$JOBS" bash -c 'analyse "$1"' _
echo "${#files[@]} files analysed, no findings"
