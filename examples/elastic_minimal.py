"""Training that goes on without restart when workers die, freeze, leave or join.

python -m torchft_ext.elastic --port 29500 &          # the store where they meet
for i in 1 2 3; do python examples/elastic_minimal.py & done
kill -9 %3                                            # the others repeat that step, and go on
python examples/elastic_minimal.py &                  # is brought up to date, and takes part
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torchft_ext import elastic

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--address", default="127.0.0.1:29500/job1", help="host:port/name")
parser.add_argument("--size", type=int, default=3, help="how many workers found the job")
parser.add_argument("--steps", type=int, default=2000)
arguments = parser.parse_args()


def train(job: elastic.Job) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 16)
    targets = inputs @ torch.randn(16, 1)
    model = DDP(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = elastic.BatchSampler(inputs, batch_size=32, seed=1)
    state = elastic.State(model, optimizer, sampler)

    for step in elastic.steps(state, total=arguments.steps):
        with step:
            batch = sampler.indices()
            loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
            loss.backward()
            step.commit(optimizer.step)
        if step.committed and step.number % 100 == 0 and step.view.rank == 0:
            print(f"step {step.number}: loss {loss:.5f}, {step.view.size} workers", flush=True)


sys.exit(elastic.run(train, arguments.address, size=arguments.size, min_size=1))
