from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ProcessGroup as _ProcessGroup
from torch._C._distributed_c10d import Store

from torchft_ext._stats import Stats
from torchft_ext.errors import CommError

class Options(_Backend.Options):
    """What one group may choose; None leaves it to the environment or to init_process_group()."""

    def __init__(
        self,
        *,
        timeout: timedelta | None = None,
        interface: str | None = None,
        port_range: str | None = None,
        heartbeat: timedelta | None = None,
    ) -> None: ...
    @property
    def timeout(self) -> timedelta | None: ...
    @property
    def interface(self) -> str | None: ...
    @property
    def port_range(self) -> str | None: ...
    @property
    def heartbeat(self) -> timedelta | None: ...

class Backend(_Backend):
    """The fault-tolerant backend of one group: torchft_ext.backend(group) finds it."""

    def configure(
        self, store_addr: str, rank: int, world_size: int, *, timeout: timedelta | None = None
    ) -> None: ...
    def abort(self, why: str = "abort() was called") -> None: ...
    def errored(self) -> CommError | None: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def shutdown(self) -> None: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def stats(self) -> Stats: ...
    @property
    def epoch(self) -> int: ...
    @property
    def group_name(self) -> str: ...

class ProcessGroup(_ProcessGroup):
    """A group whose one backend is torchft_ext's: its rank and size follow the epoch."""

def _create_backend(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta | None,
    engine: str,
    name: str,
    options: Options | None,
    may_resize: bool,
    begin: bool,
) -> Backend: ...
def _create_group(store: Store, backend: Backend, devices: list[str]) -> ProcessGroup: ...
def _interrupt_pipe() -> int: ...
def _install_error_factory(factory: Callable[..., CommError]) -> None: ...
def _process_exit(within: timedelta) -> bool: ...
