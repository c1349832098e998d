"""Configuration of the documentation site: scripts/docs.sh."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torchft_ext

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "torchft_ext"
author = "The torchft_ext authors"
project_copyright = author
version = release = torchft_ext.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "stub_signatures",
    "breathe",
]
exclude_patterns = ["_ext"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "literal"  # `x` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Keys", "params_style")]
# The reference of the public C++ headers, from what scripts/docs.sh had Doxygen make of them.
breathe_projects = {"torchft_ext": os.environ["TORCHFT_EXT_DOXYGEN"]}
breathe_default_project = "torchft_ext"
breathe_default_members = ("members",)
breathe_show_include = False
# Each header opens the namespaces anew.
suppress_warnings = ["duplicate_declaration.cpp"]
# Names of Python and torch in signatures and docstrings: their sites are not asked.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|datetime|typing|collections|contextlib|os|signal)\..*"),
    ("py:.*", r"(timedelta|Callable|Tensor|MemPool|ErrorType|DistBackendError|TypedDict)"),
    ("py:.*", r"(ValueError|TypeError|RuntimeError|NotImplementedError|None)"),
    ("py:.*", r"_?(Backend\.Options|Future|Backend|Work)|_[ST]"),
    ("cpp:identifier", r"(std|c10|c10d|at|torch|u?int\d+_t|size_t)(::.*)?"),
    ("py:.*", r"torchft_ext\._pg_wrappers\.Manager"),
    ("py:.*", r"torchft_ext\.(_ElasticJob|elastic\._\w+\.(JobLike|Replicated|Loader))"),
    ("py:.*", r"torchft_ext\.elastic\._\w+\.(Comparison|Goal)"),
]

html_theme = "furo"
html_title = f"torchft_ext {release}"
html_static_path: list[str] = []
linkcheck_timeout = 20
