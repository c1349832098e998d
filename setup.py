"""Builds torchft_ext: setuptools drives CMake and ninja.

Decisions, and why:

* One build fits one torch minor. c10d's classes gain virtual functions between minors, so a build
  for another one loads and then calls the wrong slots. Hence: built against the torch that is
  installed (no build isolation), recorded in torchft_ext/_build_info.py, checked at import, and
  written into the wheel's requirements as torch==2.x.*.
* torch is found without importing it. A CUDA build of torch cannot be imported before its CUDA
  packages are installed, and compiling needs none of them.
* CMake, not torch.utils.cpp_extension: the core is a library without Python that C++ programs and
  tests link too, and cpp_extension imports torch.
* pybind11 is the copy in torch's include directory. With another copy c10d's classes are unknown
  types.
* Everything is laid out inside the package, as torch does it (lib/, include/, share/cmake/), and
  libraries find each other and torch relative to themselves, so that a wheel can be moved. Only an
  in-place build (pip install -e) also remembers where torch is, since it does not lie beside it.

Environment: TORCHFT_EXT_CMAKE_ARGS (more -D options), TORCHFT_EXT_BUILD_DIR (keeps objects between
builds; default build/<torch>-<python>), MAX_JOBS (compile jobs; default: the processors available),
CXX.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
HOW = "pip install . --no-build-isolation"


def find_torch() -> tuple[Path, str] | None:
    """Returns torch's directory and version, or None where there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(spec.submodule_search_locations[0])
    version_py = directory / "version.py"
    if not version_py.is_file():
        return None
    match = re.search(r"^__version__ *= *['\"]([^'\"]+)", version_py.read_text(), re.M)
    return (directory, match.group(1)) if match else None


def minor_of(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def requirements() -> list[str]:
    """The one minor built against; in an sdist made without torch, the whole supported range."""
    found = find_torch()
    if found is None:
        return [f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"]
    major, minor = minor_of(found[1])
    return [f"torch=={major}.{minor}.*"]


def give_up(message: str) -> NoReturn:
    raise SystemExit(f"\ntorchft_ext: {message}\n")


# Without build isolation nobody else checks this.
if int(setuptools.__version__.split(".")[0]) < 77:
    give_up(f"found setuptools {setuptools.__version__}; run: pip install 'setuptools>=77'")


def checked_torch() -> tuple[Path, str]:
    found = find_torch()
    if found is None:
        give_up(
            f"no torch for {sys.executable}.\n"
            f"Install {SUPPORTED} into this environment first, then:  {HOW}\n"
            "(without --no-build-isolation pip builds in an empty environment, where your torch "
            "cannot be seen, and a build against any other torch would misbehave)"
        )
    if not OLDEST <= minor_of(found[1]) <= NEWEST:
        give_up(
            f"found torch {found[1]} in {found[0]}, but this version supports {SUPPORTED}.\n"
            f"Install one of those, then:  {HOW}"
        )
    return found


def checked_tools() -> tuple[str, str]:
    """Returns cmake and ninja: those beside this Python first (pip installs them), then PATH's."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
    missing = []
    if cmake is None:
        missing.append("cmake (pip install cmake)")
    if ninja is None:
        missing.append("ninja (pip install ninja)")
    if shutil.which(compiler) is None:
        missing.append(f"{compiler}, a C++20 compiler (Debian: apt-get install g++; or set CXX)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python.h (Debian: apt-get install python3-dev)")
    if missing:
        give_up("the build needs, and did not find:\n  - " + "\n  - ".join(missing))
    assert cmake is not None
    assert ninja is not None
    return cmake, ninja


class CMakeBuild(build_ext):  # type: ignore[misc]  # setuptools has no types
    def run(self) -> None:
        torch_dir, torch_version = checked_torch()
        cmake, ninja = checked_tools()
        in_place = bool(self.inplace or self.editable_mode)
        package = (ROOT if in_place else Path(self.build_lib).resolve()) / "torchft_ext"
        package.mkdir(parents=True, exist_ok=True)
        tag = f"{torch_version}-{sys.implementation.cache_tag}"
        build_dir = Path(os.environ.get("TORCHFT_EXT_BUILD_DIR", ROOT / "build" / tag))
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        configure += [
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DTORCHFT_EXT_TORCH_DIR={torch_dir}",
            f"-DTORCHFT_EXT_ABSOLUTE_RPATH={'ON' if in_place else 'OFF'}",
            *shlex.split(os.environ.get("TORCHFT_EXT_CMAKE_ARGS", "")),
        ]
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        for step in (
            configure,
            [cmake, "--build", str(build_dir), "-j", jobs],
            [cmake, "--install", str(build_dir), "--prefix", str(package)],
        ):
            if subprocess.run(step).returncode != 0:
                give_up(f"failed, see the lines above: {shlex.join(step)}")
        (package / "_build_info.py").write_text(
            '"""Written by setup.py: what this build was made of."""\n\n'
            f'VERSION = "{self.distribution.get_version()}"\n'
            f'TORCH_VERSION = "{torch_version}"\n'
        )

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "torchft_ext"
        return [str(path) for path in package.rglob("*") if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # in place, CMake installs straight into the source tree


setup(
    install_requires=requirements(),
    # Named so that the wheel is tagged for this Python and platform; CMake makes the file.
    ext_modules=[Extension("torchft_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
