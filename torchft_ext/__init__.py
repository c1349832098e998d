"""Process groups that can be aborted at any time, and continue with other members.

    import torch.distributed as dist
    import torchft_ext

    dist.init_process_group("ft")
    ...
    try:
        dist.all_reduce(tensor)
    except torchft_ext.CommError:  # a member died
        torchft_ext.backend().configure(
            "10.0.0.1:29500/generation2", rank=new_rank, world_size=new_size
        )

The group object that DDP and other code hold stays the same. ``init_process_group("ft")`` works
without importing this package.
"""

# isort: off
from torchft_ext import _torch_version  # noqa: F401  # first: it refuses another torch
# isort: on

from torchft_ext import _build_info, _install
from torchft_ext._C import Backend, Options, Work
from torchft_ext._gloo import backends_of, replace_gloo
from torchft_ext._groups import adopt, backend
from torchft_ext._make_group import make_group
from torchft_ext._metrics import metrics
from torchft_ext._recorder import dump
from torchft_ext._stats import Stats
from torchft_ext.errors import (
    Cause,
    CommAbortedError,
    CommError,
    CommTimeoutError,
    ConnectionLostError,
    MismatchError,
    PeerLeftError,
    PeerLostError,
    RendezvousError,
    StoreLostError,
)

__all__ = [
    "Backend",
    "Cause",
    "CommAbortedError",
    "CommError",
    "CommTimeoutError",
    "ConnectionLostError",
    "MismatchError",
    "Options",
    "PeerLeftError",
    "PeerLostError",
    "RendezvousError",
    "Stats",
    "StoreLostError",
    "Work",
    "adopt",
    "backend",
    "backends_of",
    "dump",
    "make_group",
    "metrics",
    "replace_gloo",
]
__version__ = _build_info.VERSION

_install.install()
