from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ProcessGroup as _ProcessGroup
from torch._C._distributed_c10d import Store
from torch._C._distributed_c10d import Work as _Work

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
        nan_check: bool | None = None,
        poison: bool = False,
        high_priority_stream: bool = False,
        blocking_wait: bool = False,
    ) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, object]) -> Options: ...
    @property
    def timeout(self) -> timedelta | None: ...
    @property
    def interface(self) -> str | None: ...
    @property
    def port_range(self) -> str | None: ...
    @property
    def heartbeat(self) -> timedelta | None: ...
    @property
    def nan_check(self) -> bool | None: ...
    @property
    def poison(self) -> bool: ...
    @property
    def high_priority_stream(self) -> bool: ...
    @property
    def blocking_wait(self) -> bool: ...

class Backend(_Backend):
    """The fault-tolerant backend of one group: torchft_ext.backend(group) finds it."""

    def configure(
        self, store_addr: str, rank: int, world_size: int, *, timeout: timedelta | None = None
    ) -> None: ...
    def abort(self, why: str = "abort() was called") -> None: ...
    def errored(self) -> CommError | None: ...
    def check(self, timeout: timedelta | None = None) -> None:
        """Wait until everything issued on device tensors is complete, then raise what failed.

        A result on a device counts only after this: wait() does not block the host, and after a
        failure the stream goes on. Blocks, without the GIL. Host tensors need no check(): their
        wait() is one.

        Args:
            timeout: None: the group's timeout.

        Raises:
            CommError: the epoch failed, or fails now because the time ran out.
            ValueError, TypeError: the timeout is not a positive timedelta.

        Threads: any.
        """

    def set_timeout(self, timeout: timedelta) -> None: ...
    def shutdown(self) -> None: ...
    def shrink(
        self,
        ranks_to_exclude: list[int],
        shrink_flags: int = 0,
        opts_override: _Backend.Options | None = None,
    ) -> Backend:
        """Return a group of all members but these; torch.distributed.shrink_group() calls it.

        Blocks, without the GIL, until the new group's first epoch stands, up to the timeout.

        Raises:
            CommError: it could not be formed.
            ValueError: bad ranks or flags.
            RuntimeError: this group has no epoch.

        Threads: any.
        """

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def stats(self) -> Stats: ...
    @property
    def options(self) -> Options:
        """Of this group; its timeout is the one that holds, as ``_timeout``."""

    @property
    def epoch(self) -> int: ...
    @property
    def group_name(self) -> str: ...

class Work(_Work):
    """One operation of an 'ft' group."""

    def check(self) -> None:
        """Wait until the operation is complete, on its device too, then raise its failure.

        Blocks, without the GIL, until the operation's deadline at most.

        Raises:
            CommError: it failed.

        Threads: any.
        """

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
    bound_device: str | None = None,
    beside: Backend | None = None,
    ranks_beside: list[int] = ...,
) -> Backend: ...
def _create_group(store: Store, backend: Backend, devices: list[str]) -> _ProcessGroup: ...
def _interrupt_pipe() -> int: ...
def _install_error_factory(factory: Callable[..., CommError]) -> None: ...
def _process_exit(within: timedelta) -> bool: ...
