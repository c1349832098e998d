#!/usr/bin/env bash
# torch's own suite of distributed tests, from its wheel, on gloo and on "ft": three forked ranks a test, on the CPU. Prints
# what passes on gloo and not on ft, with the line of torch that refuses; fails where that is more, or less, than
# tests/conformance/expected.toml lists. A few minutes, after scripts/build.sh.
#   scripts/conformance.sh                       all tests; the result for machines: build/conformance.json
#   scripts/conformance.sh --json FILE           that file instead
#   scripts/conformance.sh test_all_gather ...   some tests
#   scripts/conformance.sh --no-expected ...     each difference in full, with the traceback of a rank
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mkdir -p "$BUILD_ROOT"
PYTHONPATH=tests exec python -m conformance --json "$BUILD_ROOT/conformance.json" "$@"
