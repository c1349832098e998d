"""Doxygen's filter for the public headers: makes the comments there its own.

doxygen_comments.py HEADER: writes it to the standard output, line for line. A comment above is that
of what follows, the first one that of the file; a comment behind is that of what stands before it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ABOVE = re.compile(r"(\s*)//(.*)")
HEADING = re.compile(r" ---- \w+\.")
BEHIND = re.compile(r"(.*\S)\s+//(.*)")


def text_of(comment: str) -> str:
    """Return the comment as Doxygen's Markdown; code is indented by three spaces there."""
    if comment.startswith("   "):
        return "   " + comment
    return re.sub(r"([<>#@\\])", r"\\\1", comment)


def of_cpp(lines: list[str]) -> list[str]:
    """Convert comments that begin with two slashes."""
    found = []
    column = -1  # of a comment behind in the line before
    for line in lines:
        if above := ABOVE.fullmatch(line):
            mark = "///<" if len(above[1]) == column else "///"
            found.append(above[1] + mark + text_of(HEADING.sub("", above[2])))
        elif behind := BEHIND.fullmatch(line):
            column = len(line) - len(behind[2]) - len("//")
            found.append(f"{behind[1]}  ///<{text_of(behind[2])}")
            continue
        else:
            found.append(line)
            column = column if above else -1
    return found


def of_c(text: str) -> str:
    """Convert comments of C."""
    behind = re.sub(r"(?m)(\S.*?)/\*(.*\*/)$", r"\1/**<\2", text)
    return re.sub(r"(?m)^( *)/\* ", r"\1/** ", behind)


def main(path: str) -> None:
    """Write the header."""
    text = Path(path).read_text()
    if text.startswith("/*"):
        print(of_c(text).replace("/** ", "/** \\file\n * ", 1), end="")
    else:
        print("\n".join(["/// \\file", *of_cpp(text.splitlines())]))


if __name__ == "__main__":
    main(*sys.argv[1:])
