"""Makes the names "ft", "ft:host" ... known to torch.distributed.

`import torch` calls register() through the entry point group "torch.backends". It only enters
names: the package itself is imported when a group is made with one of them.
"""

from __future__ import annotations

from typing import Any

import torchft_ext_names


def _create(opts: Any, pg_options: Any, name: str, backend_name: str = "ft") -> Any:
    from torchft_ext._register import create

    return create(opts, pg_options, name=name, backend_name=backend_name)


def _backend_in_place_of_gloo(*args: Any, **kwargs: Any) -> Any:
    from torchft_ext._register import backend_in_place_of_gloo

    return backend_in_place_of_gloo(*args, **kwargs)


def _group_in_place_of_gloo(*args: Any) -> Any:
    from torchft_ext._register import group_in_place_of_gloo

    return group_in_place_of_gloo(*args)


_MAKERS = torchft_ext_names.Makers(
    create=_create,
    backend_in_place_of_gloo=_backend_in_place_of_gloo,
    group_in_place_of_gloo=_group_in_place_of_gloo,
)


def register() -> None:
    """Enter the names in torch.distributed, now or when it is imported. Idempotent."""
    torchft_ext_names.register(_MAKERS)
