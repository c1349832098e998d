#!/usr/bin/env bash
# Formatting, lint, types, include direction.
#   scripts/lint.sh         says what is wrong
#   scripts/lint.sh --fix   first rewrites what can be rewritten
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mapfile -t cpp_files < <(find csrc tests/cpp tests/sim tests/nccl tests/nccl_host tests/fuzz examples/cpp benchmarks/native \( -name '*.h' -o -name '*.cpp' \) | sort)
if [ "${1:-}" = --fix ]; then
  clang-format -i "${cpp_files[@]}"
  ruff check --quiet --fix .
  ruff format --quiet .
fi
clang-format --version
clang-format --dry-run -Werror "${cpp_files[@]}"
ruff check .
ruff format --check .
mypy # of what, and how strictly: pyproject.toml
python scripts/check_includes.py
