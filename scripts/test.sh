#!/usr/bin/env bash
# Builds, then runs the C++ tests and the Python tests. Arguments go to pytest.
#   scripts/test.sh [PYTEST ARGUMENT...]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

scripts/build.sh --tests
ctest --test-dir "$BUILD_ROOT/dev" --output-on-failure --no-tests=error -j "$JOBS"
python -m pytest tests/python "$@"
