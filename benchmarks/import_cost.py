"""What the entry point adds to `import torch`.

torch loads and calls the entry points of "torch.backends" at the end of its import, ours among
them. Each process imports torch with that switched off, then has torch do it: once to the clock,
torch's own search for entry points included, which it also makes where nothing is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import bench_ranks as ranks
import bench_report as report

PROGRAM = """
import json, time
begun = time.perf_counter()
import torch
imported = time.perf_counter()
torch._import_device_backends()
done = time.perf_counter()
import sys
assert "torchft_ext_autoload" in sys.modules and "torchft_ext" not in sys.modules
import importlib.metadata
searching = time.perf_counter()
importlib.metadata.entry_points(group="torch.backends")
searched = time.perf_counter() - searching
print(json.dumps({"torch": imported - begun, "entry points": done - imported, "search": searched}))
"""


def one_process() -> dict[str, float]:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    times: dict[str, float] = json.loads(done.stdout)
    return times


def measure(processes: int) -> dict[str, Any]:
    ranks.progress(f"import torch in {processes} processes")
    times = [one_process() for _ in range(processes)]
    return {name: report.summary([each[name] for each in times]) for name in times[0]}


def main() -> int:
    parser = report.make_parser(__doc__, quick="3 processes")
    parser.add_argument("--processes", type=int, help="default 30")
    arguments = parser.parse_args()
    arguments.processes = arguments.processes or (3 if arguments.quick else 30)
    run = report.describe_run(arguments)
    result = measure(arguments.processes)
    report.print_machine(run)
    rows = []
    for name, what in (
        ("torch", "import torch, entry points switched off"),
        ("entry points", "its search for entry points, and ours"),
        ("search", "such a search alone, again"),
    ):
        row = [report.format_ms(result[name][key]) for key in ("median", "p99")]
        rows.append([what, *row])
    report.print_table(["what", "median ms", "p99 ms"], rows)
    report.write_json(arguments.json, {"benchmark": "import_cost", **run, "results": [result]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
