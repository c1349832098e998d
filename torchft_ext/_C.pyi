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

from torchft_ext._stats import Stats
from torchft_ext.elastic._native import AnswerFields, ViewFields
from torchft_ext.errors import CommError

_T = TypeVar("_T")
_S = TypeVar("_S")

class Options(_Backend.Options):
    """What one group may choose: ``init_process_group("ft", pg_options=Options(...))``.

    None leaves it to the environment variable, then to the default. A bad value of a variable is a
    ValueError where a group is made.

    Threads: any. Nothing of it changes, but for the timeout (Backend.set_timeout()).
    """

    def __init__(
        self,
        *,
        timeout: timedelta | None = None,
        interface: str | None = None,
        port_range: str | None = None,
        local_sockets: bool | None = None,
        heartbeat: timedelta | None = None,
        nan_check: bool | None = None,
        poison: bool = False,
        high_priority_stream: bool = False,
        blocking_wait: bool = False,
    ) -> None:
        """Check the values, all given by keyword; nothing is opened or sent.

        Each property of this class says more: values, environment variable and default.

        Args:
            timeout: the limit of operations and of configure().
            interface: the network interface to listen on.
            port_range: the TCP ports to listen on.
            local_sockets: whether processes of one host and user talk through Unix sockets.
            heartbeat: the silence after which a peer counts as frozen.
            nan_check: whether a NaN in this rank's input of an operation is a failure.
            poison: whether outputs of failed device operations become NaN.
            high_priority_stream: whether device operations run on streams of high priority.
            blocking_wait: whether wait() of device operations blocks the host too.

        Raises:
            ValueError: a time that is not positive, a heartbeat out of its bounds, an empty
                interface, no port range, or one of fewer than three ports.
            TypeError: a value of another type than the property says.
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
        "^docker,lo" (all but these). Where there is none, making the group is a ValueError. Or an
        address of this host, as a number: "10.0.0.5".

        Environment: TORCHFT_EXT_SOCKET_IFNAME, then GLOO_SOCKET_IFNAME.

        Default: the address by which the store is reached, else that of this host's name, else
        loopback.
        """

    @property
    def port_range(self) -> str | None:
        """str or None: the TCP ports to listen on, first and last: "7000-7100"; "0": any.

        A process takes three, so fewer are refused. Where all are taken, making the group is a
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
    def nan_check(self) -> bool | None:
        """bool or None: a NaN in this rank's input of an operation fails the generation.

        That is a CommAbortedError on all ranks, and names this one.

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
        """bool: wait() of device operations blocks the host too, and raises what became of them.

        Default: False.
        """

class Backend(_Backend):
    """The fault-tolerant backend of one group: torchft_ext.backend(group) finds it."""

    def configure(
        self, store_addr: str, rank: int, world_size: int, *, timeout: timedelta | None = None
    ) -> None:
        """Begin a new generation of this group with another rank and world size.

        Ends the current generation first. Blocks, without the GIL, until all `world_size` members
        that name the same address have come and are connected, up to the timeout. After a success
        rank, size, torch's rank tables and DDP's divisor are those of the new generation. After a
        failure the group has no generation, and configure() may be called again.

        Args:
            store_addr: "host:port/prefix" of a TCPStore, "[ipv6]:port/prefix". A prefix serves one
                generation: take a new one for each.
            rank: this process's in the new generation, 0 to `world_size` - 1.
            world_size: of the new generation, 1 or more.
            timeout: for the whole call; None: the group's timeout.

        Raises:
            CommError: by kind: a member did not come in time, died or gave up, the store was lost,
                two took one rank, or abort() was called meanwhile.
            ValueError, TypeError: bad arguments; nothing has been sent.
            RuntimeError: after shutdown(), while another thread is in configure(), in a forked
                child, or for another size where torch keeps the group's (docs/limits.md).

        Threads: any; one at a time.
        """

    def abort(self, why: str = "abort() was called") -> None:
        """End the generation on every rank, or the configure() that is under way here.

        Releases every waiter at once, then waits until the engine is out of all tensors: 50 ms as a
        rule. Does nothing where there is nothing to end. The next configure() starts clean.

        Args:
            why: what the errors of all ranks will say.

        Threads: any, at any time; also from callbacks.
        """

    def get_error(self) -> ErrorType:
        """torch's type of the error that the generation failed with, without blocking.

        SUCCESS where there is none, TIMEOUT, REMOTE_ERROR where a member was lost or left, else
        COMM_ERROR. Source: c10d's getError(), which torch binds for its own NCCL backend alone.
        """

    def errored(self) -> CommError | None:
        """Return what the generation, or the last configure(), failed with; None: it stands.

        Does not block. Threads: any.
        """

    def check(self, timeout: timedelta | None = None) -> None:
        """Wait until everything issued on device tensors is complete, then raise what failed.

        A result on a device counts only after this: wait() does not block the host, and after a
        failure the stream goes on. Blocks, without the GIL. Host tensors need no check(): their
        wait() is one.

        Args:
            timeout: None: the group's timeout.

        Raises:
            CommError: the generation failed, or fails now because the time ran out.
            ValueError, TypeError: the timeout is not a positive timedelta.

        Threads: any.
        """

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later operations, and of calls of configure() that name none.

        Raises:
            ValueError, TypeError: not a positive timedelta.

        Threads: any.
        """

    def register_mem_pool(self, pool: MemPool, symm: bool = False) -> None:
        """Register a memory pool's device memory with NCCL, in this generation and in all to come.

        Operations on tensors in it can then go without NCCL's own buffers. Each new communicator
        of all ranks gets it before its first operation, those between two ranks never. Called
        again, it adds the segments that have come since. All ranks of the group must register
        alike, since NCCL requires that all ranks of an operation pass registered memory or none
        does. The pool is kept alive until deregister_mem_pool(), shutdown() or the group's end, and
        beyond that as long as a communicator has it. configure() then waits until the communicators
        of earlier generations are freed. Blocks, without the GIL, up to the group's timeout.

        Args:
            pool: a torch.cuda.MemPool, or what has its `id` and `snapshot()`.
            symm: must be False: live peers could still write into symmetric memory after an abort.

        Raises:
            NotImplementedError: symm, or a group without NCCL.
            ValueError, TypeError: a pool that is none; nothing was registered.
            RuntimeError: after shutdown(), or in a forked child.
            torch.distributed.DistBackendError: NCCL refused a segment, which it names; what this
                call registered is taken back, and the generation stands.
            CommTimeoutError: not done in time; as above.

        Threads: any; before the first generation too. Source: ProcessGroupNCCL's, which raises
        where no communicator exists yet, and takes symm.
        """

    def deregister_mem_pool(self, pool: MemPool) -> None:
        """Wait until everything issued on device tensors is complete, then take a pool back.

        No graph that uses it may be replayed meanwhile. Blocks, without the GIL, up to the group's
        timeout. The pool is forgotten whatever is raised but for the first three, and a
        CommTimeoutError which says that another thread's registration took all of the time.

        Raises:
            ValueError, TypeError: a pool that is none, or is not registered.
            RuntimeError: after shutdown(), or in a forked child.
            NotImplementedError: a group without NCCL.
            torch.distributed.DistBackendError: NCCL refused; the generation stands, and its
                communicator keeps the pool to its end.
            CommTimeoutError: operations were not complete, or NCCL did not come back, in time: a
                member may be frozen. The generation has failed.

        Threads: any. Source: ProcessGroupNCCL's.
        """

    def shutdown(self) -> None:
        """Say goodbye to the other members, once what was issued is done, and end the generation.

        Blocks, without the GIL, for 5 s or the group's timeout at most: a receive that nobody
        answers takes that long, and fails then. configure() raises after.
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
        """Return a group of all members but these; torch.distributed.shrink_group() calls it.

        Blocks, without the GIL, until the new group's first generation stands, up to the timeout.

        Raises:
            CommError: it could not be formed.
            ValueError: bad ranks or flags.
            RuntimeError: this group has no generation.

        Threads: any.
        """

    def rank(self) -> int:
        """Return this process's rank in the generation.

        Of a failed generation too, until configure() begins another; before the first, the rank
        that the group was made with. Does not block. Threads: any.
        """

    def size(self) -> int:
        """Return the number of ranks in the generation, under the same rules as rank().

        Does not block. Threads: any.
        """

    def stats(self) -> Stats:
        """Return what this group and its process have done so far: see Stats.

        Takes milliseconds, without the GIL: it counts open descriptors. Threads: any.
        """

    @property
    def options(self) -> Options:
        """Of this group; its timeout is the one that holds, as ``_timeout``."""

    @property
    def generation(self) -> int:
        """The number of the last generation that was active, which grows; 0 before the first."""

    @property
    def group_name(self) -> str:
        """The group's name in torch.distributed; errors and the log call it so."""

class Future(_Future[_T]):
    """The future of an operation on host memory, or what a callback of one came to.

    Its callbacks run on threads of the library, in the order in which operations end, one at a
    time; while one waits, in `wait()` here or of a Work, others run. Collectives that a callback
    issues run beside those of other threads, in any order that the ranks' callbacks run in. That
    goes for futures of collectives; what a callback of a send's or a receive's future issues is
    in the order of the other threads' collectives, by chance.

    Threads: any.
    """

    def then(self, callback: Callable[[Future[_T]], _S]) -> Future[_S]:
        """As torch's, but that the callback never runs on the caller's thread."""

    def add_done_callback(self, callback: Callable[[Future[_T]], None]) -> None:
        """As torch's, but that the callback never runs on the caller's thread."""

    def wait(self) -> _T:
        """Block until it is complete; return its value, or raise the failure.

        It ends by the limit of the operation, or when the callback that it stands for has
        returned.
        """

class Work(_Work):
    """One operation of an 'ft' group."""

    def get_future(self) -> _Future[list[Tensor]]:
        """Return the operation's future: a list of its output tensors, or its failure.

        Does not block. On host memory it is a Future of this module; on a device torch's own, which
        is complete at once, in stream order.

        Threads: any.
        """

    def check(self) -> None:
        """Wait until the operation is complete, on its device too, then raise its failure.

        Blocks, without the GIL, until the operation's deadline at most.

        Raises:
            CommError: it failed.

        Threads: any.
        """

    def synchronize(self) -> None:
        """Wait as ``wait()`` does.

        Blocks, without the GIL (torch's own method holds it), until the operation's deadline at
        most.

        Raises:
            CommError: it failed.

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
def _engine_names() -> list[str]: ...
def _publish_failed_init(store: Store, rank: int, size: int, why: str) -> None: ...
def _sampled_bits(tensors: Sequence[Tensor | None], seed: int, of_gradients: bool) -> bytes: ...

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
    def set_sole_holders(self, ranks: Sequence[int], patience: timedelta) -> None: ...
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
def _install_error_factory(factory: Callable[..., CommError]) -> None: ...
def _ipc_device_type() -> str: ...
def _ipc_capturing(device: int) -> bool: ...
def _ipc_memory(address: int, device: int) -> tuple[int, int, bytes]: ...
def _process_exit(within: timedelta) -> bool: ...
