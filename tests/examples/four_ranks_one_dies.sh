#!/usr/bin/env bash
# Runs examples/c/allreduce.c as four processes, of which rank 2 dies. Exit status 0: the others were right to the end.
#   tests/examples/four_ranks_one_dies.sh PROGRAM
set -euo pipefail

meeting=$(mktemp -d)
trap 'rm -rf "$meeting"' EXIT
ranks=()
for rank in 0 1 2 3; do
  timeout 60 "$1" "$rank" 4 "$meeting" 2 &
  ranks+=($!)
done
status=0
for rank in 0 1 3; do
  wait "${ranks[rank]}" || { echo "rank $rank of $1 failed" >&2; status=1; }
done
wait "${ranks[2]}" && { echo "rank 2 of $1 did not die" >&2; status=1; }
exit $status
