"""The steps of tests/gpu/run.sh: what they run, how long they may take, what became of them.

Steps run in two lanes side by side, in two phases: the tests wait for the build. A step that fails
does not stop the others. A step may also use what those before it in its lane left of their
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
import threading
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
INTERRUPTED_ENDS_WITHIN = 8.0  # seconds in which pytest says what it has found so far
KILLED_ENDS_WITHIN = 20.0  # seconds; what the driver holds on to may stay longer
WHOLE = 575  # seconds, budgets at most; the last step's end comes on top, within ten minutes
LANES = (0, 1)  # that run side by side: two share a GPU without trouble, three do not
PHASES = (0, 1)
HERE = "not without_a_device and not on_the_simulator"  # what needs faults injected is not here
DEVICE_TESTS = "tests/python/device/test_device_"


@dataclass(frozen=True)
class Step:
    """One line of the table.

    Attributes:
        budget: seconds. On an H100 with 16 cores a step takes about nine tenths of it.
        phase: those of an earlier phase have ended.
        lane: those of its phase and lane come one after the other.
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
    phase: int = 1
    lane: int = 0


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
    operations = ("collectives", "dtypes", "order", "works", "batches", "arguments")
    kinds = ("names", "subgroups", "nan_check", "memory_pools", "streams")
    # Ranks that share a GPU are slow, four twice as slow as three. Other tests have three.
    few_ranks = f"{HERE} and not (reference_result and (-3] or -4]))"
    few_staged = f"{HERE} and not (reference_result and (-1] or -3]))"
    return [
        Step("machine", 12, [python, "tests/gpu/machine.py"], phase=0),
        Step("build", 88, build, phase=0),
        Step("control", 25, [python, "tests/gpu/control.py"], phase=0, lane=1),
        Step("operations", 185, tests(*operations, *kinds, only=few_ranks)),
        Step("through host memory", 60, tests("staged", only=few_staged)),
        Step("training", 190, tests("training", "frameworks", "wrappers", "newcomers")),
        Step(
            "memcheck",
            40,
            sanitized,
            env=careful,
            needs=sanitized[0] if device == "cuda" else None,
        ),
        Step(
            "aborts",
            165,
            tests("aborts", "failures", only=f"{HERE} and not generations_leave"),
            lane=1,
        ),
        Step("matrix", 215, tests("matrix"), lane=1),
        Step(
            "100 generations",
            95,
            tests("failures", only="generations_leave and not non_blocking", limit=240),
            lane=1,
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
        "TORCHFT_EXT_CMAKE_ARGS": f"-DTORCHFT_EXT_BUILD_TESTS={cpp} -DTORCHFT_EXT_PRECOMPILE=ON",
        "TORCHFT_EXT_TEST_DEVICE": device,
        "TORCHFT_EXT_TEST_PATIENCE": "25",
        "TORCHFT_EXT_TEST_RECORD": str(records),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    }


# ---- one step


def run_step(step: Step, limit: float, env: dict[str, str], folder: Path) -> Result:
    """Run it, for `limit` seconds at most; its process group does not outlive it."""
    if step.needs is not None and shutil.which(step.needs, path=search_path()) is None:
        return Result(step.name, "skipped", 0.0, detail=f"{step.needs} {step.without}")
    log = log_of(step.name, folder)
    junit = log.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    command = list(step.command)
    if "pytest" in command:
        logs = folder / "ranks" / step.name.replace(" ", "_")  # what each rank has said
        command += [f"--junitxml={junit}", f"--basetemp={logs}"]
        logs.parent.mkdir(exist_ok=True)
    begun = time.monotonic()
    with open(log, "w") as out:
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


def log_of(name: str, folder: Path) -> Path:
    return folder / f"{name.replace(' ', '_')}.txt"


_running: set[subprocess.Popen[bytes]] = set()


def kill_running() -> None:
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_or_kill(process: subprocess.Popen[bytes], limit: float) -> int | None:
    _running.add(process)
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
        _running.discard(process)


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
    """report.json, log.txt, and the table at the end. Threads: any may add()."""

    def __init__(self, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log.txt"
        self.log.write_text("")
        self._lock = threading.Lock()
        self.records = folder / "records.jsonl"
        self.records.write_text("")
        self._json = folder / "report.json"
        self._device = device
        self._when = datetime.now(UTC).isoformat(timespec="seconds")
        self._begun = time.monotonic()
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        own = log_of(result.name, self.folder)
        with self._lock:
            self.results.append(result)
            if own.is_file():
                with open(self.log, "a") as log:
                    log.write(own.read_text(errors="replace"))
                own.unlink()
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
        print(f"\n{'step':16s}{'result':>10s}{'seconds':>10s}  tests")
        for result in self.results:
            counts = " ".join(f"{count} {name}" for name, count in result.counts.items() if count)
            line = f"{result.name:16s}{result.result:>10s}{result.seconds:>10.1f}"
            print(f"{line}  {counts or result.detail}")
        print(f"{'whole':26s}{time.monotonic() - self._begun:>10.1f}")
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
    """budgets: no step gets more than its own and what those before it in its lane have left."""
    ends = time.monotonic() + seconds

    def run_lane(steps: list[Step]) -> None:
        granted = time.monotonic()
        for step in steps:
            granted += (step.budget or seconds) if budgets else seconds
            limit = min(granted, ends) - time.monotonic()
            report.add(run_step(step, limit, env, report.folder))

    for lanes in in_lanes(chosen):
        threads = [threading.Thread(target=run_lane, args=(lane,), daemon=True) for lane in lanes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: a step is a session of its own
            kill_running()
            raise


def in_lanes(chosen: Iterable[Step]) -> list[list[list[Step]]]:
    """By phase and lane."""
    of = [[[s for s in chosen if (s.phase, s.lane) == (p, n)] for n in LANES] for p in PHASES]
    return [[lane for lane in lanes if lane] for lanes in of]


def longest(chosen: Iterable[Step]) -> int:
    """Seconds that all budgets take, lanes side by side."""
    phases = in_lanes(chosen)
    return sum(max((sum(s.budget for s in lane) for lane in lanes), default=0) for lanes in phases)


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
    print(f"{'step':16s}phase lane  budget  command")
    for step in chosen:
        extra = "".join(f"{name}={value} " for name, value in step.env.items())
        place = f"{step.name:16s}{step.phase + 1:5d}{step.lane + 1:5d}{step.budget:>6d} s"
        print(f"{place}  {extra}{shlex.join(step.command)}")
    print(f"{'whole':26s}{longest(chosen):>6d} s")


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
