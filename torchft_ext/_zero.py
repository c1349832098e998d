"""ZeroRedundancyOptimizer, which is partitioned for one rank and one size.

After a change it would update the parameters of its old rank, and send those of its new rank. Some
parameters would then never be updated on any rank, without an error. So it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what stands around torch's functions; once `MODULE` has been imported."""
    from torch.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    return [(ZeroRedundancyOptimizer, "_local_step", _local_step)]


def _local_step(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
    if (rank, size) != (self.rank, self.world_size):
        raise RuntimeError(
            f"ZeroRedundancyOptimizer: expected rank {self.rank} of {self.world_size}, for which "
            f"its parameters are partitioned, found rank {rank} of {size}: the group has begun "
            "another generation; make a new optimizer on all members (consolidate_state_dict() "
            "before "
            "a planned change keeps its state)"
        )
    return theirs(self, *args, **kwargs)
