#!/usr/bin/env bash
# The failure matrix (tests/matrix) on ranks built here. Arguments go to it:
#   scripts/matrix.sh                       every case; long
#   scripts/matrix.sh --sample --minutes 3  a random part that holds every value of every axis
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

scripts/build.sh --tests
PYTHONPATH=tests exec python -m matrix --rank "$BUILD_ROOT/dev/tests/cpp/torchft_ext_rank" "$@"
