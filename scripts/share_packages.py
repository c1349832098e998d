#!/usr/bin/env python3
"""Gives another environment some packages of this one, with what they require, as pip would.

Hard links where that is possible: no download, no copy. Versions are this environment's.

    python scripts/share_packages.py ENVIRONMENT PACKAGE...
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement  # pytest brings it
from packaging.utils import canonicalize_name

OURS, SCRIPTS = sysconfig.get_path("purelib"), sysconfig.get_path("scripts")


def with_requirements(names: list[str]) -> dict[str, Distribution]:
    """The packages, and all that they and the extras that are asked for require."""
    found: dict[str, Distribution] = {}
    waiting = [(canonicalize_name(name), "") for name in names]
    seen = set()
    while waiting:
        name, extra = each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        found[name] = distribution(name)
        for requirement in map(Requirement, found[name].requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                required = canonicalize_name(requirement.name)
                waiting += [(required, of) for of in ("", *requirement.extras)]
    return found


def files_of(package: Distribution) -> list[str]:
    """Relative to site-packages. Not package.files, which takes seconds for torch's thousands."""
    record = package.read_text("RECORD")
    if record is None:
        sys.exit(f"{package.name}: no RECORD of its files; was it installed by pip?")
    return [row[0] for row in csv.reader(record.splitlines())]


def is_script(file: str) -> bool:
    """One that pip wrote for this environment's Python."""
    if os.path.dirname(file) != SCRIPTS:
        return False
    with open(file, "rb") as opened:
        return opened.read(2) == b"#!"


def share(source: str, target: str, python: str) -> None:
    """A hard link to the file; a script becomes one of the other environment's."""
    if is_script(source):
        program = Path(source).read_bytes().partition(b"\n")[2]
        Path(target).write_bytes(b"#!" + os.fsencode(python) + b"\n" + program)
        shutil.copymode(source, target)
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def main() -> None:
    environment, names = os.path.abspath(sys.argv[1]), sys.argv[2:]
    python = os.path.join(environment, "bin", "python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    theirs = answer.stdout.strip()
    packages = with_requirements(names)
    for file in sorted({file for package in packages.values() for file in files_of(package)}):
        source, target = (os.path.normpath(os.path.join(site, file)) for site in (OURS, theirs))
        if os.path.exists(source):  # not so of every compiled file
            os.makedirs(os.path.dirname(target), exist_ok=True)
            share(source, target, python)
    print("shared:", ", ".join(f"{name} {packages[name].version}" for name in sorted(packages)))


if __name__ == "__main__":
    main()
