"""The names "ft", "ft:host" ... that torch.distributed knows, and "gloo" where it is replaced.

Nothing of the package is imported here, so that `import torch` stays cheap, and so that the
package's own modules can use this one: torchft_ext_autoload.py passes in what makes groups.

Owner: the process. Threads: one at a time.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
_REPLACE = "TORCHFT_EXT_REPLACE_GLOO"
# torch's functions that make backends, and that see to their recording (2.15).
_MAKERS = ("_new_process_group_helper", "_maybe_attach_flight_recorder")
_AS_GLOO = "ft_as_gloo"  # what it finds in place of "gloo"
# vLLM's function that makes a group object around gloo's backend, without torch's functions.
_BUILDER = ("vllm.distributed.utils", "init_gloo_process_group")


@dataclass(frozen=True)
class Makers:
    """The functions behind the names; each has the arguments of the one that it stands for.

    Attributes:
        create: of torch's creators of backends, with `name` and `backend_name` beside them.
        backend_in_place_of_gloo: of ProcessGroupGloo().
        group_in_place_of_gloo: of vLLM's init_gloo_process_group().
    """

    create: Callable[..., Any]
    backend_in_place_of_gloo: Callable[..., Any]
    group_in_place_of_gloo: Callable[..., Any]


_makers: Makers | None = None


def _made_by() -> Makers:
    if _makers is None:
        raise RuntimeError("torchft_ext: call torchft_ext_autoload.register() first")
    return _makers


def register(makers: Makers) -> None:
    """Enter the names in torch.distributed, now or when it is imported. Idempotent."""
    global _makers
    _makers = makers
    module = sys.modules.get(_TARGET)
    if module is not None and hasattr(module, "Backend"):
        _enter_names(module)
    else:
        _when_imported(_TARGET, _enter_names)


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
        creator = partial(_made_by().create, name=name)
        backend.register_backend(name, creator, extended_api=True, devices=list(devices))
    plugins = dict(backend._plugins)
    unlisted = {name.upper(): plugins.pop(name.upper()) for name in NAMES}
    backend._plugins = _Plugins(plugins, unlisted)
    if _is_told_to_replace_gloo():
        replace_gloo(module)


def _is_told_to_replace_gloo() -> bool:
    value = os.environ.get(_REPLACE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_REPLACE}: expected '0' or '1', found '{value}'")
    return value == "1" and os.environ.get("TORCHFT_EXT_DISABLE", "") != "1"


# ---------------------------------------------------------------- in the place of gloo


def gloo(module: ModuleType) -> Any:
    """Return torch's own class of gloo's backends, whatever stands under its name."""
    found: Any = getattr(module, "ProcessGroupGloo", None)
    return getattr(found, "_theirs", found)


def replaces_gloo(module: ModuleType) -> bool:
    """Return whether groups that are asked for with "gloo" are groups of this package."""
    return isinstance(getattr(module, "ProcessGroupGloo", None), _InPlaceOfGloo)


def replace_gloo(module: ModuleType) -> None:
    """Make groups of this package where "gloo" is asked for. Idempotent.

    Versions: all. Reason: programs have the name in their code. End: with the need.
    """
    if replaces_gloo(module) or gloo(module) is None:
        return
    theirs = module.ProcessGroupGloo
    ours = _InPlaceOfGloo("ProcessGroupGloo", (), {"_theirs": theirs, "__doc__": theirs.__doc__})
    for place in _places(module):
        if getattr(place, "ProcessGroupGloo", None) is theirs:
            place.ProcessGroupGloo = ours  # type: ignore[attr-defined]
    _enter(module.Backend, _AS_GLOO, ["cpu"], name="ft_host", backend_name="gloo")
    config = module.BackendConfig
    config._torchft_ext_theirs = config.get_device_backend_map
    config.get_device_backend_map = _get_device_backend_map
    _when_imported(_BUILDER[0], _replace_builder)


def restore_gloo(module: ModuleType) -> None:
    """Undo replace_gloo(); groups that were made stay. Idempotent."""
    if not replaces_gloo(module):
        return
    ours, theirs = module.ProcessGroupGloo, gloo(module)
    for place in _places(module):
        if getattr(place, "ProcessGroupGloo", None) is ours:
            place.ProcessGroupGloo = theirs  # type: ignore[attr-defined]
    module.BackendConfig.get_device_backend_map = module.BackendConfig._torchft_ext_theirs
    del module.BackendConfig._torchft_ext_theirs


def _replace_builder(builders: ModuleType) -> None:
    """Have vLLM's function make groups whose rank and size follow the generation.

    Versions: torch before 2.14; vLLM 0.33. Reason: its group object keeps the rank and size that it
    was made with. End: with torch 2.13.
    """
    theirs = getattr(builders, _BUILDER[1], None)
    if theirs is None or hasattr(theirs, "_torchft_ext"):
        return

    def build(prefix_store: Any, group_rank: int, group_size: int, timeout: Any) -> Any:
        if not replaces_gloo(sys.modules[_TARGET]):
            return theirs(prefix_store, group_rank, group_size, timeout)
        return _made_by().group_in_place_of_gloo(prefix_store, group_rank, group_size, timeout)

    build._torchft_ext = True  # type: ignore[attr-defined]
    setattr(builders, _BUILDER[1], build)


def _places(module: ModuleType) -> list[ModuleType]:
    """Where torch has the class."""
    names = ("torch.distributed", "torch._C._distributed_c10d")
    return [module, *(sys.modules[name] for name in names if name in sys.modules)]


def _get_device_backend_map(self: Any) -> dict[str, Any]:
    """As torch's, but what makes backends finds ours in place of gloo.

    So does what attaches torch's recorder of operations to those that do not record themselves.
    """
    found: dict[str, Any] = type(self)._torchft_ext_theirs(self)
    if sys._getframe(1).f_code.co_name not in _MAKERS:
        return found
    return {device: _AS_GLOO if name == "gloo" else name for device, name in found.items()}


class _InPlaceOfGloo(type):
    """The class of the class that stands for torch's ProcessGroupGloo.

    Calling it makes a backend of this package, of a fixed rank and size as gloo's are. Backends of
    this package and gloo's own are its instances. All other attributes are those of torch's class.
    """

    _theirs: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _made_by().backend_in_place_of_gloo(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        if isinstance(instance, cls._theirs):
            return True
        native = sys.modules.get("torchft_ext._C")
        return native is not None and isinstance(instance, native.Backend)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "_theirs"), name)


def add(name: str) -> None:
    """Enter "ft:<name>" and "ft_<name>", for CPU tensors, in torch.distributed. Idempotent."""
    backend = sys.modules[_TARGET].Backend
    for full in names_of(name):
        _enter(backend, full, ["cpu"], name=full)


def _enter(backend: Any, entered: str, devices: list[str], **chosen: str) -> None:
    """Enter another name, which is not listed. Idempotent."""
    if entered.upper() not in backend._plugins:
        creator = partial(_made_by().create, **chosen)
        backend.register_backend(entered, creator, extended_api=True, devices=devices)
        backend._plugins.hide(entered.upper())


def _when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` once that module has been executed; now, where it has been. Idempotent."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        then(module)
    elif not any(isinstance(each, _Finder) and each.name == name for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function right after a module has been executed, then goes."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader, then the function."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
