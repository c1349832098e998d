#!/usr/bin/env python3
"""Train through deaths, a freeze, newcomers, and the end of the store.

Four workers and a warm spare train a small convolutional network on handwritten digits with
DistributedDataParallel, by elastic.steps(). One worker is killed in mid-step: the spare steps in.
One is frozen: the others go on as three, a newcomer joins them, and the thawed worker joins again.
Then the store's process is killed, and yet another worker: the members go on without a store. The
same training without a fault runs first, for comparison.

Read worker_main() and train() first: they are what a training script of your own would contain.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from digits_model import GLOBAL_BATCH, Digits, DigitsNet, accuracy
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from torchft_ext import elastic

SILENCE = timedelta(seconds=1)  # a frozen worker is left out after that
FOUNDERS = 4
STEPS = 360
FEWEST_STEPS = 40
PAUSE_S = 0.3
SLOW_PACE_S = 0.1
PICTURES = (".png", ".pdf", ".svg")


# ---- the worker ----


def worker_main(arguments: argparse.Namespace) -> None:
    data = Digits(arguments.seed)
    if arguments.held:
        await_order()
    left_out = True
    while left_out:
        with membership(arguments) as job:
            try:
                train(job, data, arguments)
                left_out = False
            except elastic.LeftOutError as error:  # it was frozen: it comes back as a newcomer
                tell_error("left out", error)


@contextmanager
def membership(arguments: argparse.Namespace) -> Iterator[elastic.Job]:
    """Come to the job, and leave it in order."""
    size = arguments.world
    job = elastic.join(arguments.address, size=size, min_size=1, max_size=size, limit=SILENCE)
    try:
        yield job
    finally:
        job.close()
        dist.destroy_process_group()


def train(job: elastic.Job, data: Digits, arguments: argparse.Namespace) -> None:
    images, labels = data.train
    torch.manual_seed(arguments.seed)
    net = DigitsNet(images)
    # Small buckets, so that a step consists of several allreduces, as with a real model.
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.04, momentum=0.9)
    sampler = elastic.BatchSampler(labels, GLOBAL_BATCH // arguments.world, seed=arguments.seed)
    state = elastic.State(ddp, optimizer, sampler)
    net.first.weight.register_hook(pause_where_ordered)

    def divide_batch(view: elastic.View) -> None:
        sampler.batch_size = GLOBAL_BATCH // view.size

    tell("ready")
    seen = 0
    for step in elastic.steps(state, arguments.steps, job=job, build=divide_batch):
        began = time.monotonic()
        if step.view.number != seen:
            seen = step.view.number
            tell_view(step, state)
        with step:
            mine = sampler.indices()
            loss = functional.cross_entropy(ddp(images[mine]), labels[mine])
            loss.backward()
            step.commit(optimizer.step)
        if step.failure is not None:
            tell_error("error", step.failure)
        elif step.committed:
            tell("step", step=state.step, loss=loss.item(), world=step.view.size, view=seen)
            time.sleep(max(0.0, began + pace_of(arguments) - time.monotonic()))
    tell("done", accuracy=accuracy(ddp, *data.test), digest=state.digest())


# ---- what only a demonstration needs ----


def tell(event: str, **fields: object) -> None:
    """A line of JSON to the launcher, with the time on the clock that all processes share."""
    print(json.dumps({"event": event, "time": time.monotonic(), **fields}), flush=True)


def tell_error(event: str, error: Exception) -> None:
    tell(event, kind=type(error).__name__, text=str(error))


def tell_view(step: elastic.Step, state: elastic.State) -> None:
    """Say who takes part from now on, and the hash of the state that it goes on from."""
    view = step.view
    tell(
        "view",
        view=view.number,
        rank=view.rank,
        world=view.size,
        continuing=view.continuing,
        step=state.step + 1,
        digest=state.digest(),
        phases={name: spent.total_seconds() for name, spent in view.phases.items()},
    )


def pace_of(arguments: argparse.Namespace) -> float:
    """Seconds; slow while the story waits for a process, which is not to find the training over."""
    pace: float = arguments.pace
    awaited = arguments.slow is not None and arguments.slow.exists()
    return max(pace, SLOW_PACE_S) if awaited else pace


def await_order() -> None:
    if not sys.stdin.readline():
        sys.exit("the launcher is gone")


def pause_where_ordered(_: Tensor) -> None:
    """Wait for a fault in mid-step: some of this worker's gradients are out, others not."""
    if select.select([sys.stdin], [], [], 0)[0] and sys.stdin.readline():
        tell("in mid-step")
        time.sleep(PAUSE_S)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"of {GLOBAL_BATCH} images; default %(default)s",
    )
    parser.add_argument(
        "--pace", type=float, default=0.02, help="seconds a step takes at least; default 0.02"
    )
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="default %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--world", type=int, default=FOUNDERS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)  # of the job: this is a worker
    parser.add_argument("--held", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--slow", type=Path, help=argparse.SUPPRESS)  # while it exists
    arguments = parser.parse_args()
    trouble = "" if arguments.address else trouble_with(arguments)
    if trouble:
        parser.error(trouble)
    return arguments


def trouble_with(arguments: argparse.Namespace) -> str:
    """Returns what is wrong with them, or nothing."""
    if arguments.steps < FEWEST_STEPS:
        return f"--steps must be at least {FEWEST_STEPS}, found {arguments.steps}"
    if not 0 <= arguments.pace <= 1:
        return f"--pace must be 0 to 1, found {arguments.pace:g}"
    return trouble_with_picture(arguments.output)


def trouble_with_picture(path: Path) -> str:
    if path.suffix.lower() not in PICTURES:
        return f"--output must end in one of {', '.join(PICTURES)}, found '{path}'"
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        return f"--output must be a file that can be written, found '{path}'"
    return ""


def main() -> int:
    arguments = parse_arguments()
    if arguments.address:
        worker_main(arguments)
        return 0
    import digits_launcher

    return digits_launcher.demonstrate(arguments)


if __name__ == "__main__":
    sys.exit(main())
