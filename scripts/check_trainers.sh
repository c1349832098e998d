#!/usr/bin/env bash
# Runs Ray Train, and torchtitan's fault-tolerant parts with torchft, on groups of this package and the CPU: programs of
# examples/frameworks in which a process is killed. In an environment of its own, which has the development environment's
# torch and the versions below. After scripts/build.sh.
#   scripts/check_trainers.sh              both
#   scripts/check_trainers.sh --build      makes the environment alone
#   scripts/check_trainers.sh ray_train    one: ray_train, torchtitan_replicas
# Works in $TORCHFT_EXT_BUILD_ROOT/trainers.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

work="$BUILD_ROOT/trainers"
fill_environment() {
  local install=(retry "$work/venv/bin/python" -m pip install --quiet)
  "${install[@]}" 'ray[train]==2.60.0' torchft==0.2.0 spmd_types==0.2.3 tyro==1.0.17
  # Alone: its requirements would bring data sets, tokenizers and a dashboard.
  "${install[@]}" --no-deps torchtitan==0.3.0
}
environment_of_its_own torchft_ext
[ "${1:-}" != --build ] || exit 0

export PATH="$work/venv/bin:$PATH" RAY_USAGE_STATS_ENABLED=0 RAY_ADDRESS=local RUST_LOG=warn
log="$work/run.log"

# expect PATTERN [COUNT]: that many lines of the log have it.
expect() {
  local found
  grep -E "$1" "$log" || true
  found=$(grep -cE "$1" "$log") || true
  [ "$found" = "${2:-1}" ] || { cat "$log"; die "expected ${2:-1} lines with '$1', found $found"; }
}

# The survivor's error names the worker that was killed; the run that Ray repeats goes on from a checkpoint: the last one,
# or the one before where the worker died before Ray had taken that.
check_ray_train() {
  expect '^worker 0: PeerLostError: .*rank 1 .*its process ended'
  expect '^backend ft: 40 steps, the last (20|30) by the second workers'
}

# Each shard that is left is told of its peer in the replica that was killed; all four end alike.
check_torchtitan_replicas() {
  expect '^replica 0, shard [01]: step 10: PeerLostError: .*its process ended' 2
  expect '^exit codes: \[\[0, 0\], \[0, 0\]\]'
  expect '^replica [01], shard [01]: [0-9]+ steps' 4
  [ "$(grep -o 'the sum of the weights is .*' "$log" | sort -u | wc -l)" = 1 ] || die "the replicas have different weights"
  expect '^replica 1, shard [01]: .* came at [1-9][0-9]' 2
}

programs=("$@")
[ $# -gt 0 ] || programs=(ray_train torchtitan_replicas)
for program in "${programs[@]}"; do
  say "$program"
  case $program in
    ray_train | torchtitan_replicas) ;;
    *) die "expected ray_train or torchtitan_replicas, found $program" ;;
  esac
  timeout 1800 python "examples/frameworks/$program.py" >"$log" 2>&1 || { cat "$log"; exit 1; }
  "check_$program"
done
