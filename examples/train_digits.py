#!/usr/bin/env python3
"""Train through the death of a worker.

Four workers train a small convolutional network on handwritten digits with
DistributedDataParallel. In the middle of a step one of them is killed (SIGKILL). The others get an
error, begin a new generation as a group of three, agree on the state to go on from, and train on
with the same DDP object. The same training without a failure runs first, for comparison.

Read worker_main() first: that is what a training script of your own would contain.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import digits_state
import torch
import torch.distributed as dist
from digits_membership import Membership, await_newer
from digits_model import Digits, DigitsNet, accuracy, largest_difference, mean_gradients
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import torchft_ext

OPERATION_LIMIT = timedelta(seconds=30)
MEMBERSHIP_LIMIT_S = 30.0
VICTIM = 1  # not the last worker, so that others change their rank
FIRST_KILL_STEP = 3  # DDP forms its buckets before
PICTURES = (".png", ".pdf", ".svg")


# ---- the worker ----


def worker_main(arguments: argparse.Namespace) -> None:
    me: int = arguments.worker
    torch.manual_seed(arguments.seed)
    store = dist.TCPStore("127.0.0.1", arguments.store_port, is_master=False)
    members, rank = Membership.first(arguments.world), me

    dist.init_process_group(
        "ft",
        store=dist.PrefixStore(members.prefix, store),
        rank=rank,
        world_size=members.world,
        timeout=OPERATION_LIMIT,
    )
    data = Digits(arguments.seed)
    # Small buckets, so that a step consists of several allreduces, as with a real model.
    ddp = DistributedDataParallel(DigitsNet(data.train[0]), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.04, momentum=0.9)

    step = 0
    healthy = True
    while step < arguments.steps:
        try:
            if not healthy:
                members, rank = begin_next_generation(store, members, rank)
                step = digits_state.take_furthest(ddp.module, optimizer, step)
                digits_state.compare(ddp.module, optimizer)
                tell("agreed", steps_done=step)
            before = None if healthy else copy.deepcopy(ddp.module)
            if me == VICTIM and step + 1 == arguments.kill_step:
                stop_in_backward(ddp.module)
            loss = train_step(ddp, optimizer, data.batch(step, rank, members.world))
            step += 1
            report_step(step, loss, healthy)
            healthy = True
            if before is not None:
                # Averages follow the new size: else these gradients would be off by a quarter.
                alone = mean_gradients(before, *data.batch(step - 1))
                tell("checked", difference=largest_difference(ddp.module, alone))
        except torchft_ext.CommError as error:
            # Whichever operation it was: this generation is over, on every rank. The same group and
            # the same DDP object serve the next one.
            healthy = False
            tell("error", kind=type(error).__name__, text=str(error), step=step + 1)

    tell(
        "done",
        accuracy=accuracy(ddp.module, *data.test),
        digest=digits_state.digest(ddp.module, optimizer),
    )
    dist.destroy_process_group()


def begin_next_generation(
    store: dist.TCPStore, old: Membership, old_rank: int
) -> tuple[Membership, int]:
    """Wait until the launcher has decided who is left, and form the group anew."""
    new, rank = await_newer(store, old, old_rank, MEMBERSHIP_LIMIT_S)
    torchft_ext.backend().configure(f"127.0.0.1:{store.port}/{new.prefix}", rank, new.world)
    tell("configured", rank=dist.get_rank(), world=dist.get_world_size())
    return new, rank


def train_step(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> float:
    images, labels = batch
    optimizer.zero_grad()
    loss = functional.cross_entropy(ddp(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


# ---- what only a demonstration needs ----


def tell(event: str, **fields: object) -> None:
    """A line of JSON to the launcher, with the time on the clock that all processes share."""
    print(json.dumps({"event": event, "time": time.monotonic(), **fields}), flush=True)


def report_step(step: int, loss: float, healthy: bool) -> None:
    if dist.get_rank() == 0:
        tell("step", step=step, loss=loss, world=dist.get_world_size())
    if not healthy:
        tell("resumed", step=step)


def stop_in_backward(model: DigitsNet) -> None:
    """Let the victim wait for its end in mid-step: some of its gradients are out, others not."""

    def wait_for_the_end(_: Tensor) -> None:
        tell("in mid-step")
        time.sleep(60)
        raise RuntimeError("the victim was not killed")

    model.first.weight.register_hook(wait_for_the_end)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, help="passes over the training images; default 20")
    length.add_argument("--steps", type=int, help="the same, in steps of 120 images")
    parser.add_argument("--world", type=int, default=4, help="workers, 2 to 6; default 4")
    parser.add_argument("--kill-step", type=int, help="in which one dies; default half-way")
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="default %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    for hidden in ("--worker", "--store-port"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return arguments
    trouble = trouble_with(arguments)
    if trouble:
        parser.error(trouble)
    return arguments


def trouble_with(arguments: argparse.Namespace) -> str:
    """Fill in what was left out. Returns what is wrong with the rest, or nothing."""
    if arguments.epochs is not None and arguments.epochs < 1:
        return f"--epochs must be at least 1, found {arguments.epochs}"
    if arguments.steps is None:
        arguments.steps = (arguments.epochs or 20) * Digits(arguments.seed).steps_per_epoch
    if arguments.steps <= FIRST_KILL_STEP:
        return f"--steps must be at least {FIRST_KILL_STEP + 1}, found {arguments.steps}"
    if arguments.kill_step is None:
        arguments.kill_step = max(FIRST_KILL_STEP, arguments.steps // 2)
    if not 2 <= arguments.world <= 6:
        return f"--world must be 2 to 6, found {arguments.world}"
    if not FIRST_KILL_STEP <= arguments.kill_step < arguments.steps:
        return (
            f"--kill-step must be {FIRST_KILL_STEP} to {arguments.steps - 1}, found "
            f"{arguments.kill_step}: DDP forms its buckets first"
        )
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
    if arguments.worker is not None:
        worker_main(arguments)
        return 0
    import digits_launcher

    return digits_launcher.demonstrate(arguments, VICTIM)


if __name__ == "__main__":
    sys.exit(main())
