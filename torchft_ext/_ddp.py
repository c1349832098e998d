"""What DistributedDataParallel caches of an epoch, reset when the next one begins.

torch's reducer keeps the divisor of its last backward; after a backward that failed it would go on
dividing by the old world size. And a newcomer's DDP has not rebuilt its buckets yet where a
survivor's has: without a reset their collectives would not match.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_living: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def watch() -> None:
    """Remember each DDP object from here on; called once, when the package is imported."""
    initialise = DistributedDataParallel.__init__
    if getattr(initialise, "_torchft_ext", False):
        return

    @functools.wraps(initialise)
    def remembering(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        _living.add(self)

    remembering._torchft_ext = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = remembering  # type: ignore[method-assign]


def follow_epoch(group: dist.ProcessGroup) -> None:
    """Make the DDP objects of this group begin anew: divisor, buckets, unfinished backward."""
    for model in list(_living):
        if getattr(model, "process_group", None) is group:
            model._update_process_group(group)
