#!/usr/bin/env bash
# Makes the development environment in $VENV: torch, then requirements-dev.txt. Does nothing where that is done already.
#   scripts/setup.sh          what building and the demo need
#   scripts/setup.sh --tests  also what the C++ tests need (GoogleTest)
#   scripts/setup.sh --all    also what fuzzing needs and sanitizers take (clang and its runtime)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

choose_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if have "$candidate" &&
      "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 found (looked for: ${PYTHON:-python3 python3.13 python3.12 python3.11})"
}

missing_packages() {
  have g++ || echo g++
  have make || echo make
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))' || echo python3-dev
  [ -n "${1:-}" ] || return 0
  [ -f /usr/include/gtest/gtest.h ] || [ -f /usr/src/googletest/CMakeLists.txt ] || echo libgtest-dev
  [ -f /usr/include/benchmark/benchmark.h ] || echo libbenchmark-dev
  [ "$1" = --all ] || return 0
  have clang++ || echo clang
}

# clang's runtime is a package of its own, which some distributions install with clang and others do not.
have_fuzzer() {
  local probe status=0
  probe=$(mktemp -d)
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$probe/probe.cpp"
  clang++ -fsanitize=fuzzer,address,undefined "$probe/probe.cpp" -o "$probe/probe" 2>/dev/null || status=$?
  rm -rf "$probe"
  return "$status"
}

python=$(choose_python)
mapfile -t missing < <(missing_packages "${1:-}")
[ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
[ "${1:-}" != --all ] || have_fuzzer || apt_install "libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev"

stamp="$VENV/.torchft_ext-$(cat requirements-dev.txt scripts/setup.sh <(echo "$TORCH_VERSION") | sha256sum | cut -c1-16)"
if [ ! -f "$stamp" ]; then
  say "setting up $VENV with $("$python" --version), torch $TORCH_VERSION"
  [ -x "$VENV/bin/python" ] || "$python" -m venv --prompt torchft_ext "$VENV"
  pip_install "torch==$TORCH_VERSION"
  pip_install -r requirements-dev.txt
  rm -f "$VENV"/.torchft_ext-*
  touch "$stamp"
fi
