#!/usr/bin/env bash
# Runs the tests that need the real torchft (tests/python/process_group/test_torchft.py), its lighthouse and its Managers among them, in
# an environment of its own, which has the development environment's torch and the version below. After scripts/build.sh.
#   scripts/check_torchft.sh [PYTEST ARGUMENTS...]
#   scripts/check_torchft.sh --nightly [PYTEST ARGUMENTS...]   torchft's nightly of October 2026 on torch 2.14.1, by whose
#                                                              reconfigure() its Managers form groups; builds for that
#                                                              torch as scripts/check_torch.sh does
# Works in $TORCHFT_EXT_BUILD_ROOT/torchft or torchft-nightly.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tree=$ROOT work="$BUILD_ROOT/torchft" torchft=torchft==0.2.0
if [ "${1:-}" = --nightly ]; then
  shift
  scripts/check_torch.sh --package 2.14.1
  tree="$BUILD_ROOT/run-torch-2.14.1"
  work="$BUILD_ROOT/torchft-nightly" torchft=torchft-nightly==2026.10.26
  export PATH="$tree/.venv/bin:$PATH"
fi
fill_environment() { retry "$work/venv/bin/python" -m pip install --quiet "$torchft" parameterized==0.9.0; }
environment_of_its_own pytest pytest-timeout

cd "$tree"
export PATH="$work/venv/bin:$PATH" PYTHONPATH="$tree" CUDA_VISIBLE_DEVICES=''
python -m pytest tests/python/process_group/test_torchft.py --timeout 300 "$@"
