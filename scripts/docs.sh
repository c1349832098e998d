#!/usr/bin/env bash
# Makes the documentation site, after scripts/build.sh; every warning is an error.
#   scripts/docs.sh              the site: $TORCHFT_EXT_BUILD_ROOT/docs/html/index.html
#   scripts/docs.sh --linkcheck  asks every link that leads elsewhere whether it still does
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

builder=$([ "${1:-}" = --linkcheck ] && echo linkcheck || echo html)
stamp="$VENV/.docs-$(sha256sum <requirements-docs.txt | cut -c1-16)"
if [ ! -f "$stamp" ]; then
  pip_install -r requirements-docs.txt
  rm -f "$VENV"/.docs-*
  touch "$stamp"
fi
have doxygen || apt_install doxygen
# Of the public C++ headers, for docs/reference/cpp_api.md.
export TORCHFT_EXT_DOXYGEN="$BUILD_ROOT/docs/doxygen/xml"
mkdir -p "$BUILD_ROOT/docs/doxygen"
(cat docs/Doxyfile; echo "OUTPUT_DIRECTORY = $BUILD_ROOT/docs/doxygen") | doxygen -
rm -rf "$BUILD_ROOT/docs/$builder" # what is not read again cannot warn again
python -m sphinx --builder "$builder" --nitpicky --fail-on-warning --keep-going --quiet \
  --doctree-dir "$BUILD_ROOT/docs/doctrees" --fresh-env docs "$BUILD_ROOT/docs/$builder"
say "made $BUILD_ROOT/docs/$builder"
