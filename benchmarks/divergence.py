"""What the comparison of members costs a step: CPU time of the digest, and of what is refused.

One process without a group. A step is forward, backward and the optimizer's update of a stack of
linear layers with their biases, with a scheduler and a sampler. The digest of `steps()`, by what
it compares, and the look for values that cannot be encoded, are timed by the thread's CPU time in
turns with the step. Aim: at most 1 % of a step, or 100 us, whichever is more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import bench_ranks as ranks
import bench_report as report
import torch
from torch import nn

from torchft_ext import elastic
from torchft_ext.elastic._evidence import Comparison
from torchft_ext.elastic._goal import Goal

SHAPES = ((4, 256, 32), (20, 512, 64), (100, 512, 64))  # layers, width, batch
AIM_SHARE, AIM_S = 0.01, 100e-6


class Training:
    """A model, and what a step of it does."""

    def __init__(self, layers: int, width: int, batch: int) -> None:
        self.model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10_000)
        sampler = elastic.BatchSampler(1000, 4)
        self.state = elastic.State(self.model, self.optimizer, self.scheduler, sampler)
        self.inputs = torch.randn(batch, width)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state.step += 1

    def digest_of(self, check: Literal["gradients", "state"]) -> Callable[[], object]:
        comparison = Comparison(self.state, Goal(total=10_000), check, None)
        return lambda: comparison.of_step().digest()


def cpu_seconds(action: Callable[[], object]) -> float:
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


def measure(layers: int, width: int, batch: int, steps: int) -> dict[str, Any]:
    ranks.progress(f"{layers} layers of {width}")
    training = Training(layers, width, batch)
    training.step()
    parts: dict[str, Callable[[], object]] = {
        "step": training.step,
        "gradients": training.digest_of("gradients"),
        "state": training.digest_of("state"),
        "refusal": training.state.check,
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(steps):
        for name, action in parts.items():
            times[name].append(cpu_seconds(action))
    seconds = {name: report.summary(values) for name, values in times.items()}
    tensors = 2 * layers
    return {"tensors": tensors, "width": width, "batch": batch, "cpu_seconds": seconds}


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    medians = {name: one["median"] for name, one in result["cpu_seconds"].items()}
    allowed = max(AIM_SHARE * medians["step"], AIM_S)
    rows = []
    for check in ("gradients", "state"):
        cost = medians[check] + medians["refusal"]
        row = [str(result["tensors"]), check, f"{medians['step'] * 1e3:.2f}"]
        row += [f"{medians[name] * 1e6:.0f}" for name in (check, "refusal")]
        rows.append([*row, f"{cost / medians['step']:.2%}", f"{cost / allowed:.2f}"])
    return rows


def main() -> int:
    parser = report.make_parser(__doc__, quick="5 steps of each")
    parser.add_argument("--steps", type=int, help="default 100")
    arguments = parser.parse_args()
    steps = arguments.steps or (5 if arguments.quick else 100)
    torch.set_num_threads(1)
    run = report.describe_run(arguments)
    results = [measure(*shape, steps) for shape in SHAPES]
    report.print_machine(run)
    head = ["tensors", "check", "step ms", "digest us", "refusal us", "of a step", "of the aim"]
    report.print_table(head, [row for result in results for row in rows_of(result)])
    report.write_json(arguments.json, {"benchmark": "divergence", **run, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
