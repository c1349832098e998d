"""The steps of tests/gpu/run.sh: what they run, how long they may take, what became of them.

A step that fails does not stop the others. A step may also use what those before it left of their
budgets, so that the whole ends in time. After each step report.json is written anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
INTERRUPTED_ENDS_WITHIN = 8.0  # seconds in which pytest says what it has found so far
KILLED_ENDS_WITHIN = 20.0  # seconds; what the driver holds on to may stay longer
WHOLE = 565  # seconds; the sum of all budgets; the last step's end comes on top, within ten minutes
HERE = "not without_a_device and not on_the_simulator"  # what needs faults injected is not here
DEVICE_TESTS = "tests/python/device/test_device_"


@dataclass(frozen=True)
class Step:
    """One line of the table.

    Attributes:
        budget: seconds.
        command: what it runs, in the project's root.
        env: besides the common environment.
        needs: a program without which it is skipped, or None.
        without: what is said then.
        optional: runs only when it is named by --only.
    """

    name: str
    budget: int
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    needs: str | None = None
    without: str = "is not there"
    optional: bool = False


@dataclass
class Result:
    """Attributes: counts: of pytest, by outcome; failed: names of tests that did not pass."""

    name: str
    result: str
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    detail: str = ""


def tests(*suites: str, only: str = HERE, limit: int = 150) -> list[str]:
    """limit: seconds of one test; longer than a rank may take to start."""
    files = [f"{DEVICE_TESTS}{suite}.py" for suite in suites]
    fixed = "-v --durations 15 -p no:cacheprovider -p at_once --maxfail 8 --timeout-method signal"
    options = [*fixed.split(), "--timeout", str(limit), "-k", only]
    return [sys.executable, "-m", "pytest", *files, *options]


def steps(device: str) -> list[Step]:
    python = sys.executable
    sanitized = [python, "tests/gpu/one_rank.py"]
    if device == "cuda":
        memcheck = "compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9"
        sanitized = [*memcheck.split(), *sanitized]
    build = [python, "setup.py", "--quiet", "build_ext", "--inplace"]
    if device != "cuda":
        build = [python, "-c", "import torchft_ext"]  # built before, with the simulator
    careful = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    kinds = ("names", "subgroups", "nan_check", "memory_pools", "streams")
    return [
        Step("machine", 30, [python, "tests/gpu/machine.py"]),
        Step("build", 60, build),
        Step("control", 25, [python, "tests/gpu/control.py"]),
        Step("aborts", 95, tests("aborts", "failures", only=f"{HERE} and not generations_leave")),
        Step("matrix", 80, tests("matrix")),
        Step("operations", 105, tests("collectives", *kinds)),
        Step(
            "100 generations",
            65,
            tests("failures", only="generations_leave and not non_blocking", limit=240),
        ),
        Step("training", 65, tests("training", "frameworks", "wrappers", "newcomers")),
        Step(
            "memcheck",
            40,
            sanitized,
            env=careful,
            needs=sanitized[0] if device == "cuda" else None,
        ),
        Step(
            "C++ tests",
            0,
            [str(BUILD / "tests/cpp/torchft_ext_tests"), "--gtest_filter=Nccl*", "--gtest_brief=1"],
            needs=str(BUILD / "tests/cpp/torchft_ext_tests"),
            without="is not built: name the step build too; GoogleTest is "
            + ("there" if has_googletest() else "missing (libgtest-dev, or its sources)"),
            optional=True,
        ),
    ]


def search_path() -> str:
    """PATH, and where CUDA's tools lie when they are not in it."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])


def has_googletest() -> bool:
    places = ("/usr/include/gtest/gtest.h", "/usr/local/include/gtest/gtest.h")
    return any(os.path.exists(p) for p in (*places, "/usr/src/googletest/CMakeLists.txt"))


def common_environment(device: str, records: Path, with_cpp: bool) -> dict[str, str]:
    cpp = "ON" if with_cpp and has_googletest() else "OFF"
    imports = [str(ROOT), str(ROOT / "tests" / "gpu"), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PATH": search_path(),
        "PYTHONPATH": os.pathsep.join(filter(None, imports)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHFT_EXT_BUILD_DIR": str(BUILD),
        "TORCHFT_EXT_CMAKE_ARGS": f"-DTORCHFT_EXT_BUILD_TESTS={cpp}",
        "TORCHFT_EXT_TEST_DEVICE": device,
        "TORCHFT_EXT_TEST_PATIENCE": "25",
        "TORCHFT_EXT_TEST_RECORD": str(records),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    }


# ---- one step


def run_step(step: Step, limit: float, env: dict[str, str], log: Path) -> Result:
    """Run it, for `limit` seconds at most; its process group does not outlive it."""
    if step.needs is not None and shutil.which(step.needs, path=search_path()) is None:
        return Result(step.name, "skipped", 0.0, detail=f"{step.needs} {step.without}")
    junit = log.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    command = list(step.command)
    if "pytest" in command:
        logs = log.parent / "ranks" / step.name.replace(" ", "_")  # what each rank has said
        command += [f"--junitxml={junit}", f"--basetemp={logs}"]
        logs.parent.mkdir(exist_ok=True)
    begun = time.monotonic()
    with open(log, "a") as out:
        out.write(f"\n== {step.name}: {shlex.join(command)}\n")
        out.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, **step.env},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        status = wait_or_kill(process, limit)
    result = Result(step.name, "passed", time.monotonic() - begun)
    if status is None:
        result.result, result.detail = "too long", f"ended after {limit:.0f} s"
    elif status != 0:
        result.result, result.detail = "FAILED", f"status {status}"
    read_counts(junit, result)
    return result


def wait_or_kill(process: subprocess.Popen[bytes], limit: float) -> int | None:
    try:
        return process.wait(timeout=max(limit, 0.1))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_ENDS_WITHIN)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_ENDS_WITHIN)


def read_counts(junit: Path, result: Result) -> None:
    """What pytest said of each test; nothing where it wrote no report."""
    if not junit.is_file():
        return
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    try:
        cases = list(xml.parse(junit).iter("testcase"))
    except xml.ParseError:
        result.detail += "; its report is cut off"
        return
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = (
            "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else ""
        )
        counts[outcome or "passed"] += 1
        if outcome == "failed":
            result.failed.append(str(case.get("name")))
    junit.unlink()
    result.counts = counts
    if counts["skipped"] and result.result == "passed":
        result.result, result.detail = "FAILED", f"{counts['skipped']} tests were skipped"


# ---- all of them


class Report:
    """report.json, log.txt, and the table at the end."""

    def __init__(self, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        self.log.write_text("")
        self.records = folder / "records.jsonl"
        self.records.write_text("")
        self._json = folder / "report.json"
        self._device = device
        self._when = datetime.now(UTC).isoformat(timespec="seconds")
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        self.results.append(result)
        print(f"{result.result:8s} {result.seconds:6.1f} s  {describe(result)}", flush=True)
        self.write()

    def write(self) -> None:
        data = {
            "when": self._when,
            "device": self._device,
            "measurement": self._device == "cuda",
            "machine": machine_of(self.log),
            "steps": [vars(result) for result in self.results],
            "figures": [json.loads(line) for line in self.records.read_text().splitlines()],
        }
        self._json.write_text(json.dumps(data, indent=2) + "\n")

    def print_table(self) -> None:
        print(f"\n{'step':14s}{'result':>10s}{'seconds':>10s}  tests")
        for result in self.results:
            counts = " ".join(f"{count} {name}" for name, count in result.counts.items() if count)
            line = f"{result.name:14s}{result.result:>10s}{result.seconds:>10.1f}"
            print(f"{line}  {counts or result.detail}")
        print(f"{'whole':24s}{sum(r.seconds for r in self.results):>10.1f}")
        if self._device != "cuda":
            print(f"On the device {self._device!r}: this shows that the plan runs, nothing else.")
        print(f"written: {self._json}")


def describe(result: Result) -> str:
    return "; ".join(filter(None, [result.name, result.detail, ", ".join(result.failed)]))


def machine_of(log: Path) -> dict[str, object]:
    """What machine.py found; it prints one line of JSON."""
    match = re.search(r"^machine: (\{.*\})$", log.read_text(), re.M)
    found: dict[str, object] = json.loads(match.group(1)) if match else {}
    return found


def run_all(
    chosen: list[Step],
    env: dict[str, str],
    report: Report,
    *,
    seconds: float = WHOLE,
    budgets: bool = True,
) -> None:
    """budgets: no step gets more than its own and what those before it have left."""
    begun, granted = time.monotonic(), 0.0
    for step in chosen:
        granted += (step.budget or seconds) if budgets else seconds
        limit = min(granted, seconds) - (time.monotonic() - begun)
        report.add(run_step(step, limit, env, report.log))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the plan and run nothing")
    parser.add_argument("--only", metavar="STEP", action="append", help="may be given again")
    parser.add_argument("--skip", metavar="STEP", action="append", default=[])
    text = f"for everything (default {WHOLE}); with --only any step may use all that is left"
    parser.add_argument("--seconds", type=float, default=float(WHOLE), metavar="S", help=text)
    out = os.environ.get("OUT", str(ROOT / "build" / "gpu-report"))
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR")
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "privateuseone"),
        help="privateuseone: simulated, to see that the plan runs; build with --tests before",
    )
    return parser.parse_args()


def choose(arguments: argparse.Namespace) -> list[Step]:
    plan = steps(arguments.device)
    unknown = {*(arguments.only or []), *arguments.skip} - {step.name for step in plan}
    if unknown:
        sys.exit(f"no such step: {', '.join(sorted(unknown))}")
    if arguments.only is not None:
        return [step for step in plan if step.name in arguments.only]
    return [step for step in plan if not step.optional and step.name not in arguments.skip]


def print_plan(chosen: list[Step]) -> None:
    for step in chosen:
        extra = "".join(f"{name}={value} " for name, value in step.env.items())
        print(f"{step.name:14s}{step.budget:>5d} s  {extra}{shlex.join(step.command)}")
    print(f"{'whole':14s}{sum(step.budget for step in chosen):>5d} s")


def main() -> int:
    arguments = parse_arguments()
    chosen = choose(arguments)
    if arguments.list:
        print_plan(chosen)
        return 0
    report = Report(arguments.out.resolve(), arguments.device)
    with_cpp = any(step.name == "C++ tests" for step in chosen)
    env = common_environment(arguments.device, report.records, with_cpp)
    run_all(chosen, env, report, seconds=arguments.seconds, budgets=arguments.only is None)
    report.print_table()
    return 0 if all(result.result == "passed" for result in report.results) else 1


if __name__ == "__main__":
    sys.exit(main())
