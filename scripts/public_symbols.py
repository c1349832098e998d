#!/usr/bin/env python3
"""Compare what the libraries export with cmake/public_core.txt and cmake/public_torch.txt.

    scripts/public_symbols.py [DIRECTORY]       of the libraries (default: torchft_ext/lib); exit
                                                status 1 where they differ
    scripts/public_symbols.py --write           take into the lists what the headers declare
    c++filt <cmake/public_core.txt              to read them

The linker gives what the lists name a public version and the rest of the library a private one
(cmake/exports.map.in). What must be public is what the headers in csrc/include declare: a function
of theirs that has the private version is missing in the list.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "csrc" / "include" / "torchft_ext"
# Library, and where its headers lie. The core's list is that of the headers without torch.
LIBRARIES = {"core": HEADERS, "torch": HEADERS / "torch"}
NAMESPACES = r"torchft_ext::(?:elastic::)?"


@dataclass(frozen=True)
class Symbol:
    """One that a library exports: mangled and plain name, linker's kind, version."""

    name: str
    plain: str
    kind: str
    version: str


@dataclass(frozen=True)
class Declared:
    """What headers declare: classes that they define, and names that they call functions."""

    classes: frozenset[str]
    functions: frozenset[str]


def list_of(library: str) -> Path:
    """Return the file with the public symbols of a library."""
    return ROOT / "cmake" / f"public_{library}.txt"


def listed(library: str) -> list[str]:
    """Return the public symbols of a library as its list has them."""
    lines = list_of(library).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def exported(path: Path) -> list[Symbol]:
    """Return the symbols that a shared library defines for others."""
    command = ["nm", "-D", "--defined-only", "--with-symbol-versions", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split()[-2:] for line in lines]
    found = [(kind, *name.partition("@")[::2]) for kind, name in rows if kind != "A"]
    names = "\n".join(name for _, name, _ in found)
    plain = subprocess.run(["c++filt"], input=names, check=True, capture_output=True, text=True)
    return [
        Symbol(name, text, kind, version.strip("@"))
        for (kind, name, version), text in zip(found, plain.stdout.splitlines(), strict=True)
    ]


def declared(directory: Path) -> Declared:
    """Read the headers of a directory, without those of its folders."""
    text = ""
    for header in sorted(directory.glob("*.h")):
        text += re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(), flags=re.DOTALL)
    classes = re.findall(r"^(?:class|struct|enum class) (\w+)[^;{]*\{", text, re.MULTILINE)
    return Declared(frozenset(classes), frozenset(re.findall(r"(\w+)\(", text)))


def is_public(symbol: Symbol, own: Declared, all_classes: frozenset[str]) -> bool:
    """Tell whether programs may name this symbol, going by the headers."""
    if symbol.name.startswith("tft_"):
        return True
    table = re.fullmatch(rf"(?:vtable|typeinfo|typeinfo name) for {NAMESPACES}(\w+)", symbol.plain)
    if table:  # of a class that has them in one place, which its first virtual function decides
        return table[1] in own.classes and has_own_destructor(table[1])
    function = re.match(rf"{NAMESPACES}(?:(\w+)::)?(~?\w+)(?:\[abi:cxx11\])?\(", symbol.plain)
    if symbol.kind != "T" or function is None:
        return False
    of_class, name = function[1], function[2]
    if of_class is not None and of_class not in own.classes:
        return False
    used = re.findall(rf"{NAMESPACES}((?:\w+::)*\w+)", symbol.plain[function.end() :])
    internal = any(each.split("::")[-1] not in all_classes for each in used)
    return name.removeprefix("~") in own.functions and not internal


def has_own_destructor(of_class: str) -> bool:
    """Tell whether a class of the headers has a destructor that is defined in the library."""
    texts = (header.read_text() for header in HEADERS.rglob("*.h"))
    return any(f"virtual ~{of_class}();" in text for text in texts)


def wanted(library: str, symbols: list[Symbol]) -> list[str]:
    """Return the symbols of a library that its headers make public."""
    own = declared(LIBRARIES[library])
    every = frozenset().union(*(declared(each).classes for each in LIBRARIES.values()))
    return sorted(each.name for each in symbols if is_public(each, own, every))


def problems(library: str, path: Path) -> list[str]:
    """Return what differs between a library, its list and its headers."""
    symbols = exported(path)
    plain = {each.name: each.plain for each in symbols}
    versions = {each.name: each.version for each in symbols}
    public = {name for name, of in versions.items() if re.fullmatch(r"TORCHFT_EXT_[0-9.]+", of)}
    private = {name for name, of in versions.items() if of.startswith("TORCHFT_EXT_PRIVATE_")}
    names = set(listed(library))
    found = [
        f"exported without a version: {plain[name]}" for name in versions.keys() - public - private
    ]
    found += [f"public, and not in the list: {plain[name]}" for name in public - names]
    found += [f"in the list, and not public: {name}" for name in names - public]
    found += [
        f"declared in a public header, and private: {plain[name]}"
        for name in set(wanted(library, symbols)) - public
    ]
    return [f"{path.name}: {each}" for each in sorted(found)]


def write(library: str, path: Path) -> None:
    """Make the list of a library anew."""
    lines = list_of(library).read_text().splitlines() if list_of(library).exists() else []
    top = [line for line in lines if line.startswith("#")]
    list_of(library).write_text("\n".join([*top, *wanted(library, exported(path))]) + "\n")


def main(arguments: list[str]) -> int:
    """Do what the arguments say."""
    writes = "--write" in arguments
    places = [each for each in arguments if each != "--write"]
    directory = Path(places[0]) if places else ROOT / "torchft_ext" / "lib"
    found: list[str] = []
    for library in LIBRARIES:
        path = directory / f"libtorchft_ext_{library}.so"
        if library == "torch" and not path.exists():  # a build without torch
            continue
        if writes:
            write(library, path)
        else:
            found += problems(library, path)
    for each in found:
        print(each)
    if found:
        print("scripts/public_symbols.py --write brings the lists up to date: see the diff")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
