# Sourced by every script here: the project's root as working directory, the environment's paths, and helpers.
#   VENV                    the virtual environment (default .venv)
#   TORCHFT_EXT_BUILD_ROOT  where build directories are made (default build)
#   TORCH_VERSION           the torch to install (default 2.13.0)
#   PYTHON                  the interpreter that makes the virtual environment
# shellcheck shell=bash
set -euo pipefail
# --help: the comment on top of the script, and nothing else.
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
VENV=$(realpath -m "${VENV:-.venv}")
BUILD_ROOT=$(realpath -m "${TORCHFT_EXT_BUILD_ROOT:-build}")
TORCH_VERSION=${TORCH_VERSION:-2.13.0}
JOBS=${MAX_JOBS:-$(nproc)}
WERROR=$([ "${CI:-}" = true ] && echo ON || echo OFF)
export PATH="$VENV/bin:$PATH"

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Networks have hiccups: three tries, further apart each time.
retry() {
  local try
  for try in 1 2 3; do
    "$@" && return 0
    say "try $try of 3 failed: $*"
    [ "$try" = 3 ] || sleep $((try * 5))
  done
  return 1
}

# Into $VENV and nowhere else: where its pyvenv.cfg has gone, its Python is the system's.
pip_install() { retry "$VENV/bin/python" -m pip --require-virtualenv install --quiet --retries 10 "$@"; }

# environment_of_its_own PACKAGE...: $work/venv, with these packages of the Python in the PATH and what the script's function
# fill_environment adds. Nothing is done where this script, as it is now, has made it.
environment_of_its_own() {
  local stamp
  stamp="$work/.made-$(sha256sum <"scripts/$(basename "$0")" | cut -c1-16)"
  [ ! -f "$stamp" ] || return 0
  rm -rf "$work"
  python -m venv --without-pip "$work/venv"
  python scripts/share_packages.py "$work/venv" pip setuptools wheel torch numpy "$@"
  fill_environment
  touch "$stamp"
}

# lift_caps_on_torch VERSION FILE: pip's configuration on this machine may cap torch. Whoever asks for one version by name,
# for an environment of its own, wants that one: from now on the FILE, which names it, is the only constraint.
lift_caps_on_torch() {
  echo "torch==$1" >"$2"
  export PIP_CONSTRAINT=$2
}

# apt_install PACKAGE...: as root installs them, otherwise says what to run.
apt_install() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "missing on this machine: $*
Install them, on Debian:  sudo apt-get install $*"
  fi
  say "installing Debian packages: $*"
  retry apt-get -o Acquire::Retries=5 -qq update >&2
  DEBIAN_FRONTEND=noninteractive retry apt-get -o Acquire::Retries=5 -qq -y --no-install-recommends install "$@" >&2
}

# tell_warnings LOG: those of the compiler, which CI takes for errors.
tell_warnings() { grep -A6 ': warning: .*\[-W' "$1" >&2 || true; }

have() { command -v "$1" >/dev/null 2>&1; }

# A test that fails runs once more, alone, and is reported: if it passes then, it depends on what ran before or beside it,
# which is a fault of the test or of the library.
repeated() { say "REPEATED: the $1 tests that failed beside others run once more, alone"; }

# run_ctest DIRECTORY [COMMAND...]: its tests, by that command. What a sanitizer has found counts, however seldom it shows.
run_ctest() {
  local directory=$1 found='(Address|Leak|Thread)Sanitizer: |: runtime error: '
  shift
  local run=("$@" ctest --test-dir "$directory" --output-on-failure --no-tests=error)
  "${run[@]}" -j "$JOBS" && return
  if grep -qE "$found" "$directory/Testing/Temporary/LastTest.log"; then return 8; fi
  repeated C++
  "${run[@]}" --rerun-failed
}

# What is compiled to be checked, not to be used, clang++ compiles in half of g++'s time.
checking_compiler() { echo "${CXX:-$(if have clang++; then echo clang++; else echo g++; fi)}"; }

# configure DIRECTORY [-D...]: a CMake build directory for core and C++ tests.
configure() {
  local directory=$1
  shift
  cmake -S . -B "$directory" -G Ninja -DPython3_EXECUTABLE="$VENV/bin/python" -DTORCHFT_EXT_BUILD_TESTS=ON \
    -DTORCHFT_EXT_WERROR="$WERROR" "$@"
}

# sanitizer_setup address|thread: $directory, configured for that sanitizer, and the environment its programs need.
sanitizer_setup() {
  local sanitizers optimise
  case ${1:-} in
    address) sanitizers=address,undefined optimise=-O0 ;; # twice as slow to compile otherwise
    thread) sanitizers=thread optimise=-O1 ;;
    *) die "expected a sanitizer: address or thread" ;;
  esac
  directory="$BUILD_ROOT/$1-sanitizer"
  mkdir -p "$BUILD_ROOT"
  CXX=$(checking_compiler) configure "$directory" -DTORCHFT_EXT_BUILD_PYTHON=OFF \
    -DTORCHFT_EXT_SANITIZE=$sanitizers -DTORCHFT_EXT_OPTIMIZE=$optimise \
    >"$directory.log" 2>&1 || { cat "$directory.log"; exit 1; }
  # The suppressions name torch's own libraries and nothing of ours.
  local supp="$ROOT/scripts/suppressions"
  export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
  export LSAN_OPTIONS="suppressions=$supp/lsan.supp:print_suppressions=0${LSAN_OPTIONS:+:$LSAN_OPTIONS}"
  export UBSAN_OPTIONS="print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
  export TSAN_OPTIONS="suppressions=$supp/tsan.supp:second_deadlock_stack=1:history_size=4${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
  export OMP_NUM_THREADS=1 # libgomp is not built for ThreadSanitizer
  # ThreadSanitizer of older compilers cannot place its shadow memory under strong address randomisation.
  unrandomised=()
  if setarch "$(uname -m)" -R true 2>/dev/null; then unrandomised=(setarch "$(uname -m)" -R); fi
}
