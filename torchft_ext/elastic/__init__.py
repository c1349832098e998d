"""Members that agree among themselves who goes on, commit steps together, and take newcomers in.

    from torchft_ext import elastic

    job = elastic.join("host0:29500/job7", size=4, min_size=2)
    ...
    for step in elastic.steps(state, total=1000):
        with step:
            loss(model(batch())).backward()
            step.commit(optimizer.step)

A dead, frozen or cut-off member costs the others a step that is run again; nobody starts anew.
"""

from torchft_ext.elastic._current import leave
from torchft_ext.elastic._errors import (
    DivergenceError,
    ElasticError,
    ElasticTimeoutError,
    JobOverError,
    LeftOutError,
    NoProgressError,
    NoQuorumError,
    RepeatedError,
    StateLostError,
)
from torchft_ext.elastic._exits import Exit
from torchft_ext.elastic._job import Job, current_job, join
from torchft_ext.elastic._random import generator, manual_seed
from torchft_ext.elastic._replicas import Place, Replicas
from torchft_ext.elastic._run import JoinOptions, run
from torchft_ext.elastic._sampler import BatchSampler
from torchft_ext.elastic._state import State
from torchft_ext.elastic._step import Step
from torchft_ext.elastic._steps import steps
from torchft_ext.elastic._sync import SyncReport, sync
from torchft_ext.elastic._view import Answer, Digest, View

__all__ = [
    "Answer",
    "BatchSampler",
    "Digest",
    "DivergenceError",
    "ElasticError",
    "ElasticTimeoutError",
    "Exit",
    "Job",
    "JobOverError",
    "JoinOptions",
    "LeftOutError",
    "NoProgressError",
    "NoQuorumError",
    "Place",
    "RepeatedError",
    "Replicas",
    "State",
    "StateLostError",
    "Step",
    "SyncReport",
    "View",
    "current_job",
    "generator",
    "join",
    "leave",
    "manual_seed",
    "run",
    "steps",
    "sync",
]
