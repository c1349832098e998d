"""docs/_ext/doxygen_comments.py: comments of the public headers as Doxygen's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILTER = Path(__file__).parents[3] / "docs/_ext/doxygen_comments.py"

CPP = """// A header.
//
//   code(a < b);
int a;  // of <a>

// Of b.
int b;  // one,
        // two
  // ---- more. Of c
int c;
"""
CPP_FOR_DOXYGEN = """/// \\file
/// A header.
///
///      code(a < b);
int a;  ///< of \\<a\\>

/// Of b.
int b;  ///< one,
        ///< two
  /// Of c
int c;
"""
C = """/* A header.
 */
/* Of a. */
int a; /* one */
"""
C_FOR_DOXYGEN = """/** \\file
 * A header.
 */
/** Of a. */
int a; /**< one */
"""


@pytest.mark.parametrize(("text", "expected"), [(CPP, CPP_FOR_DOXYGEN), (C, C_FOR_DOXYGEN)])
def test_comments_of_headers_become_doxygens(tmp_path, text, expected):
    header = tmp_path / "header.h"
    header.write_text(text)
    found = subprocess.run(
        [sys.executable, FILTER, header], capture_output=True, text=True, check=True
    )
    assert found.stdout == expected
