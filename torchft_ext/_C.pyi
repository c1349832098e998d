from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, TypeVar

from torch import Tensor
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import BuiltinCommHookType, ErrorType, GradBucket, Reducer, Store
from torch._C._distributed_c10d import ProcessGroup as _ProcessGroup
from torch._C._distributed_c10d import Work as _Work
from torch.cuda import MemPool
from torch.futures import Future as _Future  # as in torch's own stubs; it is torch._C's

from torchft_ext._stats import GroupFields, Stats
from torchft_ext.elastic._native import AnswerFields, StateFields, ViewFields
from torchft_ext.errors import CommError

_T = TypeVar("_T")
_S = TypeVar("_S")

class Options(_Backend.Options):
    """The options of one group: ``init_process_group("ft", pg_options=Options(...))``.

    If an option is None, its environment variable is used, or else the default. A bad value of a
    variable raises ValueError when a group is made.

    Threads: any. Options do not change, except the timeout (Backend.set_timeout()).
    """

    def __init__(
        self,
        *,
        timeout: timedelta | None = None,
        interface: str | None = None,
        port_range: str | None = None,
        local_sockets: bool | None = None,
        heartbeat: timedelta | None = None,
        ask_after: timedelta | None = None,
        nan_check: bool | None = None,
        poison: bool = False,
        high_priority_stream: bool = False,
        blocking_wait: bool = False,
        staged: bool | None = None,
    ) -> None:
        """Check the values. Nothing is opened or sent.

        The properties of this class give the values, environment variables and defaults in full.

        Args:
            timeout: the limit of operations and of configure().
            interface: the network interface to listen on.
            port_range: the TCP ports to listen on.
            local_sockets: whether processes of one host and user talk through Unix sockets.
            heartbeat: the silence after which a peer counts as frozen.
            ask_after: the wait after which an operation asks the others what they do.
            nan_check: whether a NaN in this rank's input of an operation is a failure.
            poison: whether outputs of failed device operations become NaN.
            high_priority_stream: whether device operations run on streams of high priority.
            blocking_wait: whether wait() of device operations blocks the host too.
            staged: whether "ft:host" takes device tensors through host memory.

        Raises:
            ValueError: If a time is not positive, the heartbeat or ask_after is out of its bounds,
                the interface is empty, or the port range is malformed or has fewer than three
                ports.
            TypeError: If a value is not of the type that the property says.
        """

    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, object]) -> Options: ...
    @property
    def timeout(self) -> timedelta | None:
        """timedelta or None: the limit of operations and of configure(), above zero.

        Rounded up to milliseconds; over a century means never. Backend.set_timeout() changes it
        later.

        Default: that of init_process_group() or new_group().
        """

    @property
    def interface(self) -> str | None:
        """str or None: the network interface to listen on.

        "eth0"; "eth" (prefix); "eth0,ib0" (the first that is there); "=eth0" (exactly);
        "^docker,lo" (all but these); or a numeric address of this host: "10.0.0.5". If there is no
        such interface, making the group raises ValueError.

        Environment: TORCHFT_EXT_SOCKET_IFNAME, then GLOO_SOCKET_IFNAME.

        Default: the address by which the store is reached, else that of this host's name, else
        loopback.
        """

    @property
    def port_range(self) -> str | None:
        """str or None: the TCP ports to listen on, first and last: "7000-7100"; "0": any.

        A process takes three, so fewer are refused. If all are taken, making the group raises
        RendezvousError.

        Environment: TORCHFT_EXT_PORT_RANGE.

        Default: any free port.
        """

    @property
    def local_sockets(self) -> bool | None:
        """bool or None: Unix sockets between processes of one host and user, cheaper than TCP.

        False: all connections of this process are TCP.

        Environment: TORCHFT_EXT_LOCAL_SOCKETS, 0 or 1.

        Default: True.
        """

    @property
    def heartbeat(self) -> timedelta | None:
        """timedelta or None: the silence after which a peer counts as frozen: a PeerLostError.

        Zero: off; else 100 ms to 24 hours, rounded up to milliseconds.

        Environment: TORCHFT_EXT_HEARTBEAT, in seconds.

        Default: 5 s.
        """

    @property
    def ask_after(self) -> timedelta | None:
        """timedelta or None: the wait after which an operation asks the others what they do.

        A WARNING in the log, and a CommTimeoutError, then name the ranks that have not issued the
        operation, what they have issued last, and what their main threads do. It ends nothing.
        Operations on host memory. Zero: off; else up to 24 hours, rounded up to milliseconds.

        Environment: TORCHFT_EXT_ASK_AFTER, in seconds.

        Default: 1 s.
        """

    @property
    def nan_check(self) -> bool | None:
        """bool or None: a NaN in this rank's input of an operation fails the generation.

        All ranks get a CommAbortedError that names this rank.

        Environment: TORCHFT_EXT_NAN_CHECK, 0 or 1.

        Default: False.
        """

    @property
    def poison(self) -> bool:
        """bool: outputs of failed device operations become NaN.

        Integers become -1 or the largest value.

        Default: False.
        """

    @property
    def high_priority_stream(self) -> bool:
        """bool: device operations run on streams of high priority.

        Default: False.
        """

    @property
    def blocking_wait(self) -> bool:
        """bool: wait() of device operations blocks the host too, and raises their failures.

        Default: False.
        """

    @property
    def staged(self) -> bool | None:
        """bool or None: "ft:host" takes device tensors too, through host memory, without NCCL.

        As gloo does: wait() blocks until the results are in the tensors. Without a device in this
        process: CPU tensors alone. With another backend than "ft:host" (or "gloo", where it is
        replaced), making the group raises ValueError.

        Default: True for groups in gloo's place, else False.
        """

class Backend(_Backend):
    """The fault-tolerant backend of one group; torchft_ext.backend(group) returns it."""

    def configure(
        self, store_addr: str, rank: int, world_size: int, *, timeout: timedelta | None = None
    ) -> None:
        """Begin a new generation of this group with another rank and world size.

        First ends the current generation. Then blocks, without the GIL, until `world_size` members
        have called configure() with the same address and are connected, up to the timeout. On
        success, the rank, the size, torch's rank tables and DDP's divisor are those of the new
        generation. On failure the group has no generation, and configure() may be called again.

        Args:
            store_addr: the address of a TCPStore with a prefix, "host:port/prefix" or
                "[ipv6]:port/prefix". Use a new prefix for each generation.
            rank: the rank of this process in the new generation, from 0 to `world_size` - 1.
            world_size: the number of members of the new generation, 1 or more.
            timeout: the limit of the whole call. If None, the group's timeout is used.

        Raises:
            CommError: If a member did not come in time, died or gave up, the store was lost, two
                members have one rank, or abort() was called. The subclass says which.
            ValueError, TypeError: If an argument is bad. Nothing has been sent.
            RuntimeError: If shutdown() was called, another thread is in configure(), this is a
                forked child, or torch does not let this group change its size (docs/limits.md).

        Threads: any; one at a time.
        """

    def abort(self, why: str = "abort() was called") -> None:
        """End the generation on every rank, or a configure() of this rank that is under way.

        Immediately releases all waiters. Then waits until the engine no longer uses any tensor,
        which normally takes less than 50 ms. Does nothing if there is nothing to end. Call
        configure() to begin the next generation.

        Args:
            why: the reason, which the errors of all ranks repeat.

        Threads: any, at any time; also from callbacks.
        """

    def get_error(self) -> ErrorType:
        """Return torch's type of the failure of the generation. Does not block.

        Returns:
            SUCCESS if the generation has not failed; TIMEOUT; REMOTE_ERROR if a member was lost or
            left; otherwise COMM_ERROR.

        Source: c10d's getError(), which torch binds only for its own NCCL backend.
        """

    def errored(self) -> CommError | None:
        """Return the failure of the generation, or of the last configure(). Does not block.

        Returns:
            The failure. None if the generation has not failed.

        Threads: any.
        """

    def check(self, timeout: timedelta | None = None) -> None:
        """Wait until all operations on device tensors are complete, and raise any failure.

        Call it before you use a result on a device: wait() does not block the host there, and after
        a failure the stream goes on with wrong data. For host tensors wait() is enough. Blocks,
        without the GIL.

        Args:
            timeout: the limit. If None, the group's timeout is used.

        Raises:
            CommError: If the generation has failed, or the time runs out, which fails it.
            ValueError, TypeError: If the timeout is not a positive timedelta.

        Threads: any.
        """

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later operations, and of later configure() calls without a timeout.

        Args:
            timeout: the limit, above zero.

        Raises:
            ValueError, TypeError: If it is not a positive timedelta.

        Threads: any.
        """

    def register_mem_pool(self, pool: MemPool, symm: bool = False) -> None:
        """Register the device memory of a pool with NCCL, for this and all later generations.

        Operations on tensors in that memory then need no buffers of NCCL's own. Every new
        communicator of all ranks gets the pool before its first operation; communicators between
        two ranks never get it. Call the method again to add segments that the pool has allocated
        since. All ranks of the group must register alike: NCCL requires that either all ranks of an
        operation pass registered memory or none.

        The pool is kept alive until deregister_mem_pool(), shutdown() or the end of the group, and
        for as long as a communicator uses it. With registered pools, configure() waits until the
        communicators of earlier generations are freed. Blocks, without the GIL, up to the group's
        timeout.

        Args:
            pool: a torch.cuda.MemPool, or an object with the same `id` and `snapshot()`.
            symm: must be False: live peers could still write into symmetric memory after an abort.

        Raises:
            NotImplementedError: If `symm` is True, or the group has no NCCL.
            ValueError, TypeError: If `pool` is not a memory pool. Nothing was registered.
            RuntimeError: If shutdown() was called, or in a forked child.
            torch.distributed.DistBackendError: If NCCL refused a segment, which the message names.
                The registrations of this call are undone, and the generation goes on.
            CommTimeoutError: If the time ran out. The same applies.

        Threads: any; also before the first generation. Source: ProcessGroupNCCL's, which raises if
        no communicator exists yet, and accepts symm.
        """

    def deregister_mem_pool(self, pool: MemPool) -> None:
        """Undo register_mem_pool(), once all operations on device tensors are complete.

        No graph that uses the pool may be replayed meanwhile. Blocks, without the GIL, up to the
        group's timeout. The group forgets the pool even if this raises, with two exceptions: the
        first three errors below, and a CommTimeoutError which says that another thread's
        registration took all of the time.

        Args:
            pool: a pool that is registered.

        Raises:
            ValueError, TypeError: If `pool` is not a memory pool, or is not registered.
            RuntimeError: If shutdown() was called, or in a forked child.
            NotImplementedError: If the group has no NCCL.
            torch.distributed.DistBackendError: If NCCL refused. The generation goes on, and its
                communicator keeps the pool until it ends.
            CommTimeoutError: If operations were not complete in time, or NCCL did not return in
                time because a member may be frozen. The generation has failed.

        Threads: any. Source: ProcessGroupNCCL's.
        """

    def shutdown(self) -> None:
        """Leave the group: finish all operations, say goodbye to the others, end the generation.

        Blocks, without the GIL, for at most 5 s or the group's timeout. A receive that nobody
        answers takes that long, and then fails. Afterwards configure() raises RuntimeError.

        Threads: any.
        """

    def _reopen(self) -> None: ...
    def _say_own_name(self, own: bool) -> None: ...
    def _incarnations(self, *, before: bool = False) -> list[str]: ...
    def _configure_over(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        beside: Backend,
        ranks_beside: list[int],
    ) -> None: ...
    def _abort_generation(self, generation: int, why: str) -> None: ...
    def shrink(
        self,
        ranks_to_exclude: list[int],
        shrink_flags: int = 0,
        opts_override: _Backend.Options | None = None,
    ) -> Backend:
        """Make a group of all members except some; torch.distributed.shrink_group() calls this.

        Blocks, without the GIL, until the first generation of the new group has formed, up to the
        timeout.

        Args:
            ranks_to_exclude: the ranks of this group that the new group does not have.
            shrink_flags: torch's flags.
            opts_override: the options of the new group. If None, those of this group are used.

        Returns:
            The backend of the new group.

        Raises:
            CommError: If the group could not be formed.
            ValueError: If ranks or flags are bad.
            RuntimeError: If this group has no generation.

        Threads: any.
        """

    def rank(self) -> int:
        """Return the rank of this process in the generation. Does not block.

        After a failure it stays the rank in the failed generation until configure() begins another
        one. Before the first generation, it is the rank that the group was made with.

        Threads: any.
        """

    def size(self) -> int:
        """Return the world size of the generation. Does not block.

        The rules of rank() for failed generations apply.

        Threads: any.
        """

    def stats(self) -> Stats:
        """Return counts of this group and its process; see Stats for the keys.

        Takes milliseconds, without the GIL, because it counts open descriptors.

        Threads: any.
        """

    @property
    def options(self) -> Options:
        """The options of this group. Their timeout is the present one, as ``_timeout``."""

    @property
    def generation(self) -> int:
        """The number of the last generation that formed. It only grows; 0 before the first."""

    @property
    def group_name(self) -> str:
        """The name of the group in torch.distributed, which errors and the log use."""

class Future(_Future[_T]):
    """The future of an operation on host memory, or of a callback that was added to one.

    Callbacks run on threads of the library, one at a time, in the order in which operations end. If
    a callback waits for this or another future, or for a Work, others run meanwhile.

    A callback may issue collectives. If its future belongs to a collective, they are independent of
    the collectives of other threads, and ranks may run their callbacks in any order. If its future
    belongs to a send or receive, they take a place among the collectives of other threads that
    depends on chance.

    Threads: any.
    """

    def then(self, callback: Callable[[Future[_T]], _S]) -> Future[_S]:
        """Add a callback as torch's method does; it never runs on the caller's thread."""

    def add_done_callback(self, callback: Callable[[Future[_T]], None]) -> None:
        """Add a callback as torch's method does; it never runs on the caller's thread."""

    def wait(self) -> _T:
        """Block until the future is complete.

        That takes at most the limit of the operation, or until the callback of this future has
        returned.

        Returns:
            The value of the future.

        Raises:
            CommError: If the operation failed. An exception of the callback is raised, too.
        """

class Work(_Work):
    """One operation of an 'ft' group."""

    def get_future(self) -> _Future[list[Tensor]]:
        """Return a future with the list of output tensors, or with the failure. Does not block.

        For host memory it is a Future of this module. For a device it is torch's own, which is
        complete immediately, in stream order.

        Threads: any.
        """

    def check(self) -> None:
        """Wait until the operation is complete, also on its device, and raise its failure.

        Blocks, without the GIL, at most until the deadline of the operation.

        Raises:
            CommError: If the operation failed.

        Threads: any.
        """

    def synchronize(self) -> None:
        """Wait as ``wait()`` does.

        Blocks, without the GIL (torch's own method holds it), at most until the deadline of the
        operation.

        Raises:
            CommError: If the operation failed.

        Threads: any.
        """

class _ReconfigurableGroup(_ProcessGroup):
    """A group whose one backend is torchft_ext's: its rank and size follow the generation.

    Only where torch has `reconfigure()`: 2.14 and later.
    """

    def reconfigure(self, opts: object) -> _Work: ...

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
    backend_name: str = "ft",
) -> Backend: ...
def _make_group(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout: timedelta | None,
    engine: str,
    name: str,
    options: Options | None,
    bound_device: str | None = None,
    beside: Backend | None = None,
    ranks_beside: list[int] = ...,
    by_rule: bool = False,
) -> _ProcessGroup: ...
def _network_options(options: Options, store: Store) -> Options: ...
def _shared_plans() -> tuple[str, int]: ...
def _engine_names() -> list[str]: ...
def _publish_failed_init(store: Store, rank: int, size: int, why: str) -> None: ...
def _sampled_bits(tensors: Sequence[Tensor | None], seed: int, of_gradients: bool) -> bytes: ...
def _job_state(
    *, address: str, members: list[str], key: str, timeout: timedelta
) -> StateFields: ...

class _LeaveFlag:
    def __init__(self) -> None: ...
    def set(self) -> None: ...
    def is_set(self) -> bool: ...

class _ElasticJob:
    @staticmethod
    def join(
        address: str,
        *,
        size: int,
        min_size: int,
        max_size: int,
        store_rule: bool,
        limit: timedelta,
        timeout: timedelta,
        interface: str | None,
        port_range: str | None,
        members: list[str],
        key: str,
        listen: str,
        leaving: _LeaveFlag,
        backoff: timedelta | None = None,
    ) -> _ElasticJob: ...
    def interface_name(self) -> str: ...
    def id(self) -> str: ...
    def manage(self, name: str, backends: list[Backend]) -> None: ...
    def recover(
        self, timeout: timedelta, patience: timedelta | None, without_quorum: bool = False
    ) -> tuple[ViewFields, dict[str, timedelta]]: ...
    def adopt(self, backend: Backend) -> None: ...
    def came_to_nothing(self, kind: str, how: str, cause: str) -> None: ...
    def log_view(self, phases: dict[str, timedelta]) -> None: ...
    def log(self, line: str) -> None: ...
    def agree(
        self,
        ok: bool,
        note: bytes,
        timeout: timedelta,
        common: bytes = ...,
        of_shard: bytes = ...,
        shard: int = ...,
        last: bool = ...,
    ) -> AnswerFields: ...
    def abort(self, why: str) -> None: ...
    def formed_view(self) -> int: ...
    def is_over(self) -> bool: ...
    def store_of(self, view: int) -> Store: ...
    def min_size(self) -> int: ...
    def waiting(self) -> list[str]: ...
    def name_of(self, member: str) -> str: ...
    def set_shard(self, shard: int | None) -> None: ...
    def record_end(self, timeout: timedelta) -> bool: ...
    def set_sole_holders(self, ranks: Sequence[int], patience: timedelta) -> None: ...
    def note_steps(self, committed: int) -> None: ...
    def set_leaving(self) -> None: ...
    def leave(self, timeout: timedelta) -> bool: ...

class _CompileQuestions:
    def hold(self) -> bool: ...
    def asked_for_rank(self) -> bool: ...

class _Promise:
    def __init__(self) -> None: ...
    @property
    def future(self) -> Future[list[Tensor]]: ...
    def complete(self, outputs: list[Tensor]) -> None: ...
    def fail(self, error: Exception, made_anew: object) -> None: ...

class _MemberWatch:
    def __init__(self, backend: Backend, generation: int) -> None: ...
    def wait(self) -> NoReturn: ...

class _IpcEvent:
    def __init__(self, device: int) -> None: ...
    def handle(self) -> bytes: ...
    def record(self) -> None: ...

class _DdpReducer:
    def __init__(self, backend: Backend, reducer: Reducer, generation: int) -> None: ...
    def generation(self) -> int: ...
    def why_stale(self) -> str | None: ...
    def read_layout(self) -> None: ...
    def renew_views(self) -> None: ...
    def compare_layouts(self) -> None: ...
    def register_hook(self, state: object, hook: Callable[..., object]) -> None: ...
    def register_builtin_hook(self, kind: BuiltinCommHookType) -> None: ...
    def run_hook(self, bucket: GradBucket) -> _Future[Tensor]: ...
    def carry_over(self, before: _DdpReducer, used: bool) -> None: ...
    def retire(self) -> None: ...

def _call_nameless(callback: Callable[[_Future[_T]], object], future: _Future[_T]) -> object: ...
def _begin_compile_questions() -> None: ...
def _end_compile_questions() -> None: ...
def _compile_questions() -> _CompileQuestions | None: ...
def _ask_aside(begins: bool) -> None: ...
def _create_group(store: Store, backend: Backend, devices: list[str]) -> _ProcessGroup: ...
def _interrupt_pipe() -> int: ...
def _warn(line: str) -> None: ...
def _info(line: str) -> None: ...
def _group_stats() -> list[GroupFields]: ...
def _process_stats() -> tuple[int, int, int]: ...
def _install_error_factory(factory: Callable[..., CommError]) -> None: ...
def _ipc_device_type() -> str: ...
def _ipc_capturing(device: int) -> bool: ...
def _ipc_memory(address: int, device: int) -> tuple[int, int, bytes]: ...
def _dump(path: str) -> int: ...
def _process_exit(within: timedelta) -> bool: ...
