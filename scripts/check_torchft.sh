#!/usr/bin/env bash
# Runs the tests that need the real torchft (tests/python/test_torchft.py), its lighthouse and its Managers among them, in
# an environment of its own, which has the development environment's torch and the version below. After scripts/build.sh.
#   scripts/check_torchft.sh [PYTEST ARGUMENTS...]
# Works in $TORCHFT_EXT_BUILD_ROOT/torchft.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

work="$BUILD_ROOT/torchft"
stamp="$work/.made-$(sha256sum <scripts/check_torchft.sh | cut -c1-16)"
if [ ! -f "$stamp" ]; then
  rm -rf "$work"
  python -m venv --without-pip "$work/venv"
  python scripts/share_packages.py "$work/venv" pip setuptools wheel torch numpy pytest pytest-timeout
  retry "$work/venv/bin/python" -m pip install --quiet torchft==0.2.0 parameterized==0.9.0
  touch "$stamp"
fi

export PATH="$work/venv/bin:$PATH" PYTHONPATH="$ROOT"
python -m pytest tests/python/test_torchft.py --timeout 300 "$@"
