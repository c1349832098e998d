#!/usr/bin/env bash
# Everything that needs a GPU, from a clean tree to a table, in ten minutes at most. Nothing is fetched.
#   tests/gpu/run.sh                  every step
#   tests/gpu/run.sh --list           the plan: steps, budgets, commands; runs nothing
#   tests/gpu/run.sh --only matrix    some steps (after a build)
#   tests/gpu/run.sh --out DIR        where report.json and log.txt go (default: $OUT, else build/gpu-report)
# PYTHON is an interpreter that has torch with CUDA, pytest and pytest-timeout (default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python3}" tests/gpu/plan.py "$@"
