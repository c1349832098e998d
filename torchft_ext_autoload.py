"""Makes the names "ft", "ft:host" ... known to torch.distributed.

`import torch` calls register() through the entry point group "torch.backends". It only enters
names: the package itself is imported when a group is made with one of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

# The engines that csrc/engines registers, and the devices that each serves.
ENGINES: dict[str, list[str]] = {"host": ["cpu"], "nccl": ["cuda"]}
# torch's own backends that are entered too; add() enters others.
_OF_TORCH: dict[str, list[str]] = {"gloo": ["cpu"], "mpi": ["cpu"]}


def names_of(engine: str) -> tuple[str, str]:
    """Return the two names of a backend with that engine: "ft:host" and "ft_host"."""
    return f"ft:{engine}", f"ft_{engine}"


# The devices that the engine under each name serves.
NAMES: dict[str, list[str]] = {
    "ft": list(dict.fromkeys(device for devices in ENGINES.values() for device in devices)),
    **{
        name: devices
        for engine, devices in {**ENGINES, **_OF_TORCH}.items()
        for name in names_of(engine)
    },
}
_TARGET = "torch.distributed.distributed_c10d"


def register() -> None:
    """Enter the names in torch.distributed, now or when it is imported. Idempotent."""
    module = sys.modules.get(_TARGET)
    if module is not None and hasattr(module, "Backend"):
        _enter_names(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _create(opts: Any, pg_options: Any, name: str) -> Any:
    from torchft_ext._register import create

    return create(opts, pg_options, name=name)


class _Plugins(dict[str, Any]):
    """Backend._plugins, with our names found by name but not listed.

    A listed plugin changes groups that do not use it: with one, torch leaves the default backend of
    a spec such as "cpu:gloo" undefined (_new_process_group_helper, 2.11 to 2.13).
    """

    def __init__(self, others: dict[str, Any], unlisted: dict[str, Any]) -> None:
        super().__init__(others)
        self._unlisted = unlisted

    def hide(self, name: str) -> None:
        """List a name no longer."""
        self._unlisted[name] = self.pop(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._unlisted

    def __missing__(self, name: str) -> Any:
        return self._unlisted[name]


def _enter_names(module: ModuleType) -> None:
    backend = module.Backend
    if "FT" in backend._plugins:
        return
    for name, devices in NAMES.items():
        backend.register_backend(
            name, partial(_create, name=name), extended_api=True, devices=list(devices)
        )
    plugins = dict(backend._plugins)
    unlisted = {name.upper(): plugins.pop(name.upper()) for name in NAMES}
    backend._plugins = _Plugins(plugins, unlisted)


def add(name: str) -> None:
    """Enter "ft:<name>" and "ft_<name>", for CPU tensors, in torch.distributed. Idempotent."""
    backend = sys.modules[_TARGET].Backend
    for full in names_of(name):
        if full.upper() not in backend._plugins:
            backend.register_backend(
                full, partial(_create, name=full), extended_api=True, devices=["cpu"]
            )
            backend._plugins.hide(full.upper())


class _Finder(importlib.abc.MetaPathFinder):
    """Enters the names right after torch.distributed has been executed, then goes."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs torch's own loader, then enters the names."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _enter_names(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
