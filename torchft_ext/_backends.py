"""This package's backends within torch's groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from torchft_ext import _C


def backends_of(group: dist.ProcessGroup) -> Iterator[_C.Backend]:
    """Yield this package's backends in a group, from under torch's debug wrapper too."""
    seen: list[_C.Backend] = []
    for device in group._device_types:
        found = group._get_backend(torch.device(device))
        found = getattr(found, "wrapped_pg", found)
        if isinstance(found, _C.Backend) and found not in seen:
            seen.append(found)
            yield found
