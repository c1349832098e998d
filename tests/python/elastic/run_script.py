"""A training script, for tests of `python -m torchft_ext.elastic run`: run_script.py HOW."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import elastic

STEPS = 3


def train(total: int, stops: bool = False) -> None:
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = elastic.State(model, optimizer)
    told = False
    for step in elastic.steps(state, total=total):
        with step:
            model(torch.ones(1, 4)).sum().backward()
            if stops and told:
                step.stop()
            step.commit(optimizer.step)
        if step.number == 0:
            print("trains", flush=True)
        if not told and elastic.current_job().waiting():
            told = True
            print("somebody waits", flush=True)


def main(how: str) -> None:
    print("joined", flush=True)
    if how == "well":
        train(STEPS)
    elif how == "for ever":
        train(10**9)
    elif how == "stops when somebody waits":
        train(10**9, stops=True)
    elif how == "exit 7":
        sys.exit(7)
    elif how == "exit 0":
        sys.exit()
    else:
        raise getattr(elastic, how, ZeroDivisionError)("of the script")


if __name__ == "__main__":
    main(sys.argv[1])
