"""One process's part in an elastic job."""

from __future__ import annotations

import atexit
import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from time import monotonic
from typing import Literal, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchft_ext import _C, _events
from torchft_ext._backends import backends_of
from torchft_ext._group_made import group_made
from torchft_ext._tally import tally
from torchft_ext.elastic import _current, _tables
from torchft_ext.elastic._errors import ElasticError, ElasticTimeoutError, NoQuorumError
from torchft_ext.elastic._native import ViewFields
from torchft_ext.elastic._overrule import Operator
from torchft_ext.elastic._traceback import RankedTraceback
from torchft_ext.elastic._view import Answer, Digest, View
from torchft_ext.elastic._view_groups import ViewGroups
from torchft_ext.errors import CommError, _kind_of

_RULES = ("members", "store")
_KEY = "TORCHFT_EXT_ELASTIC_KEY"
_LEAVE_WITHIN = timedelta(seconds=2)
_TRY_AGAIN = timedelta(seconds=5)  # less than an operator's order stands
_RECORD_WITHIN = timedelta(seconds=2)
_LEAST_HEARTBEAT, _MOST_HEARTBEAT = timedelta(milliseconds=100), timedelta(hours=24)


def join(
    address: str | None = None,
    *,
    size: int,
    min_size: int | None = None,
    max_size: int | None = None,
    rule: str = "members",
    backend: str = "ft",
    timeout: timedelta = timedelta(minutes=5),
    limit: timedelta = timedelta(seconds=5),
    interface: str | None = None,
    port_range: str | None = None,
    members: Sequence[str] = (),
    listen: str | int | None = None,
    key: str | None = None,
    wait: bool = False,
    on_no_quorum: Literal["raise", "wait"] = "raise",
) -> Job:
    """Come to a job: found it together with others, or ask for a place in it.

    Returns with a default group of one, in which models and DDP are built; the first recover(), or
    steps(), brings the members together. Blocks until the job is founded, up to the timeout. With
    `wait` it returns with the first view: rank and world size are then the job's.

    Args:
        address: "host:port/name": of a TCPStore, and the job's name. Members meet there, newcomers
            find them there, and in views of even size it counts as one voice (the witness); a
            quorum of members goes on without it. None, with `members`: there is none.
        size: how many processes found the job.
        min_size: fewer do not train; None: `size`. With rule "store": how many decide.
        max_size: more wait as spares; None: any number is taken in.
        rule: "members": more than half of the last view's voters decide on the next. "store": any
            `min_size` members do, and the store's first write counts: for launchers whose store
            outlives all workers.
        backend: of the default group.
        timeout: of this call, and of recover() and agree() that name none.
        limit: a member that does not answer for so long is left out; the heartbeat of groups that
            follow the job and have chosen none, too, such as the default group.
        interface: the network interface to listen on; None: the one towards the store.
        port_range: the TCP ports to listen on, "7000-7100"; a process takes four. None: any.
        members: "host:port" of members, the same list everywhere: then the job is founded and found
            at these addresses, and not in the store. Each of these processes gives its own port as
            `listen`.
        listen: the port, or "host:port", where the others find this process. None: any port.
        key: with `members`, a text that all processes of the job know, and nobody else; it is never
            sent. None: the value of TORCHFT_EXT_ELASTIC_KEY.
        wait: for programs that ask for rank and world size before the loop; recover() is called
            here, within the same timeout. A newcomer's collectives before steps() are not
            answered: the other members wait for it in steps().
        on_no_quorum: "wait": a recover() without a timeout of its own raises no NoQuorumError. It
            keeps the state, and waits for an operator's word, `python -m torchft_ext.elastic
            overrule`, however long that takes; leave() ends the wait. It needs an address.

    Raises:
        ElasticError: the store does not answer, or fewer than `size` processes came in time. With
            `wait`: there was no view with this process in time; the message says who did not come,
            as far as that is known. NoQuorumError: with `wait`, as recover().
        JobOverError: the job has ended well. Another run is another name.
        LeftOutError: leave() was called meanwhile. With `wait`, as recover() too.
        ValueError, TypeError: a bad argument.
        RuntimeError: there is a default group, or a job, in this process already.

    Threads: the main one.
    """
    if rule not in _RULES:
        raise ValueError(f"elastic.join: rule: expected one of {_RULES}, found {rule!r}")
    if dist.is_initialized():
        raise RuntimeError("elastic.join: expected no default group yet: join() makes it")
    if on_no_quorum not in ("raise", "wait") or (on_no_quorum == "wait" and address is None):
        raise ValueError(
            "elastic.join: on_no_quorum: expected 'raise', or 'wait' with an address, found "
            f"{on_no_quorum!r}"
        )
    if isinstance(members, str):
        raise TypeError("elastic.join: members: expected a list of addresses, found a text")
    until = monotonic() + timeout.total_seconds()
    with _current.leave_flag() as leaving:
        native = _C._ElasticJob.join(
            address or "",
            size=size,
            min_size=size if min_size is None else min_size,
            max_size=65536 if max_size is None else max_size,
            store_rule=rule == "store",
            limit=limit,
            timeout=timeout,
            interface=interface,
            port_range=port_range,
            members=list(members),
            key=os.environ.get(_KEY, "") if key is None else key,
            listen="" if listen is None else str(listen),
            leaving=leaving,
        )
        if interface is None and address is None:
            interface = native.interface_name() or None
        options = _C.Options(
            heartbeat=min(max(limit, _LEAST_HEARTBEAT), _MOST_HEARTBEAT),
            interface=interface,
            port_range=port_range,
        )
        hook = sys.excepthook
        dist.init_process_group(
            backend,
            store=_store_of(address, native.id(), timeout),
            rank=0,
            world_size=1,
            timeout=timeout,
            pg_options=copy.copy(options),
        )
        job = Job(native, timeout, limit, backend, options)
        job._traceback = RankedTraceback.install(hook)
        if on_no_quorum == "wait" and address is not None:
            me = f"{job.id} ({job.name_of(job.id)})"
            job._operator = Operator(address, me, timeout, job.is_leaving)
        _current.remember(job)
        if leaving.is_set():
            job.leave()
    group_made()
    if wait:
        _await_first_view(job, timeout, until)
    return job


def _await_first_view(job: Job, timeout: timedelta, until: float) -> None:
    """Of a job that could not be joined nothing is left: the caller may try again."""
    try:
        job.recover(timedelta(seconds=max(until - monotonic(), 0.001)))
    except BaseException as error:
        waiting = job.waiting()
        job.close()
        dist.destroy_process_group()
        if isinstance(error, CommError):
            how = error.cause.how if error.cause is not None else ""
            raise _no_first_view(timeout, how or str(error)) from error
        if type(error) in (ElasticError, ElasticTimeoutError):
            others = f"; waiting too: {', '.join(waiting)}" if waiting else ""
            raise _no_first_view(timeout, f"{error}{others}") from error
        raise


def _no_first_view(timeout: timedelta, why: str) -> ElasticError:
    return ElasticError(
        f"elastic.join: wait: no view with this process within {timeout}: {why}. Founders form it "
        "as soon as all have come to it; a newcomer is taken in between two steps of the members, "
        "where they are fewer than max_size"
    )


def _nothing() -> None:
    """There are no groups to hold."""


def _store_of(address: str | None, member: str, timeout: timedelta) -> dist.Store:
    """Return the job's store, for a group of one: the group then listens where the store is seen
    from. Where the job has none, the process's own.
    """
    if address is None:
        return dist.HashStore()
    place, name = address.split("/", 1)
    host, port = place.rsplit(":", 1)
    client = dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout)
    return dist.PrefixStore(f"{name}/alone/{member}", client)


def current_job() -> Job:
    """Return the job that this process takes part in: of its last join(), or of run().

    Raises:
        RuntimeError: there is none.
    """
    return cast(Job, _current.current())


class Job:
    """A member of an elastic job. Made by join().

    Threads: any, but for recover(), which one thread calls at a time. What blocks gives the GIL
    away, ends by its timeout, and is ended by Ctrl-C.
    """

    def __init__(
        self,
        native: _C._ElasticJob,
        timeout: timedelta,
        limit: timedelta,
        backend: str,
        options: _C.Options,
    ) -> None:
        self._native = native
        self.timeout = timeout
        self.limit = limit
        self._longest_wait = timeout  # of operations in groups of make_group()
        self._backend = backend
        self._options = options
        self._of_view: ViewGroups | None = None
        self._lock = threading.Lock()
        self._view: View | None = None
        self._managed: dict[str, list[_C.Backend]] = {}
        self._followers: list[_C.Backend] = []  # of all names
        self._rules: dict[str, Callable[[View], Sequence[int]]] = {}
        self._lasting: dict[str, dist.ProcessGroup] = {}  # of rules that were given a group
        self._ruled: dict[str, dist.ProcessGroup] = {}  # of rules, in the newest view
        self._leaving = False
        self._left = False
        self._ended = False
        self._recovering = False
        self._over_since: float | None = None  # monotonic; of away_for()
        self._traceback: RankedTraceback | None = None
        self._operator: Operator | None = None  # whose word is awaited where there is no quorum
        self._steps = 0  # committed, as count_steps() was told
        self.min_size = native.min_size()  # the founding's
        self.group: dist.ProcessGroup = c10d._get_default_group()
        self.manage("default", self.group)
        self._process = os.getpid()  # a forked child has no part in the job
        atexit.register(self._leave_at_exit)

    @property
    def id(self) -> str:
        """This member's id, in hex: another one each time a process joins."""
        return self._native.id()

    def manage(
        self,
        name: str,
        group: dist.ProcessGroup | None = None,
        rule: Callable[[View], Sequence[int]] | None = None,
    ) -> None:
        """Let a group follow the views, from the next one on. Give a group, a rule, or both.

        A group stays the same object: its generations are those of the views, of all members. With
        a rule they are of some members, and where this member is in none the group has failed. A
        rule without a group makes another group in each view. managed_group(name) returns either.

        Args:
            name: the same on all members, since newcomers hold other objects; recover() compares
                the names of all groups that have no rule.
            group: with a backend of this package; new_group([0]) after join() makes one.
            rule: returns the ranks of the view that make up this member's group, in their order;
                empty: this member is in none. It depends on the view alone, and gives all members
                of one group the same.

        Raises:
            ValueError: the group has no such backend, or is the default group and has a rule, or
                neither is given.
            RuntimeError: the name is taken, or the group follows under another one.
        """
        if group is None and rule is None:
            raise ValueError("manage: expected a group, a rule, or both")
        if name in self._managed or name in self._rules:
            raise RuntimeError(f"manage: name: expected one that is free, found {name!r}")
        if rule is not None and group is self.group:
            raise ValueError(
                "manage: rule: expected none for the default group: it has all members"
            )
        backends = [] if group is None else list(backends_of(group))
        if group is not None and not backends:
            raise ValueError(f"manage: group: expected one of the backend 'ft', found {group}")
        if any(one in self._followers for one in backends):
            raise RuntimeError("manage: group: expected one that follows under no other name yet")
        if rule is None:
            self._native.manage(name, backends)
            self._managed[name] = backends
        else:
            for backend in backends:
                self._native.adopt(backend)
            self._rules[name] = rule
            if group is not None:
                self._lasting[name] = group
        self._followers += backends

    def managed_group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group of this name's rule in view(); None: this member is in none.

        Raises:
            KeyError: there is no such rule.
        """
        if name not in self._rules:
            raise KeyError(f"managed_group: expected one of {sorted(self._rules)}, found {name!r}")
        return self._ruled.get(name)

    def make_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Make a group of some members of view(), which ends with the view; called by them only.

        Unlike groups of new_group(), which fail where they lose a member, it fails as soon as the
        view is over, and check() knows it. recover() takes it out of torch's tables. Blocks up to
        the job's timeout.

        Args:
            name: one that no group of this view has; the same on all of its members.
            ranks: the members, of the default group; their order is that of the group's ranks.

        Raises:
            CommError: it could not be formed.
            ValueError: this member is not among them.
            RuntimeError: there is no view yet.
        """
        if self._view is None:
            raise RuntimeError("make_group: expected a view: call recover() first")
        return self._groups_of(self._view).make(name, ranks)

    def _groups_of(self, view: View) -> ViewGroups:
        if self._of_view is None:
            store = self._native.store_of(view.number)
            self._of_view = ViewGroups(
                store, view.number, self._backend, self._options, self._longest_wait
            )
        return self._of_view

    def hold_shard(self, shard: int | None) -> None:
        """Say which shard of the state this member has a whole copy of; None: of none. A state that
        is not sharded is shard 0. recover() leaves nobody out by `patience` who may hold the only
        copy of a shard. steps() calls it.
        """
        self._native.set_shard(shard)

    def await_frozen(self, ranks: Sequence[int], patience: timedelta) -> None:
        """Say which ranks of view() hold something that nobody else has, such as the only copy of a
        shard. Without one of them the others cannot go on. So one that freezes is not left out
        before this time has passed, from when its silence is noticed. Returns at once. In later
        views that holds of all members until this is called again; before the first view give no
        ranks. steps() calls it where there are `replicas`.

        Raises:
            ValueError: one is no rank of the view, or the patience is not positive.
        """
        self._native.set_sole_holders(list(ranks), patience)

    @contextmanager
    def wait_at_most(self, timeout: timedelta) -> Iterator[None]:
        """Let operations wait no longer than this, within a block: of the groups that the job
        manages when it begins, and of groups that make_group() makes in a later view. Shorter
        timeouts stay.
        """
        longest = self._longest_wait
        shortened = [one for one in self._followers if one.options._timeout > timeout]
        before = [one.options._timeout for one in shortened]
        for backend in shortened:
            backend.set_timeout(timeout)
        self._longest_wait = min(longest, timeout)
        try:
            yield
        finally:
            self._longest_wait = longest
            for backend, limit in zip(shortened, before, strict=True):
                if backend.options._timeout == timeout:  # nobody has set another one meanwhile
                    backend.set_timeout(limit)

    def hold_groups(self) -> AbstractContextManager[Callable[[], None]]:
        """Let groups of make_group() that lose nobody outlive the view's end, within a block.

        The block is given what it calls once it has something to send: they are then not aborted in
        the 50 ms after it either, in which it still arrives.

        steps() does so from agree() to the end of the update: a replica that is whole then ends
        its update, whatever happens to others.
        """
        return nullcontext(_nothing) if self._of_view is None else self._of_view.hold()

    def view(self) -> View | None:
        """Return the newest view that this process has formed; None: none yet. Does not block."""
        return self._view

    def is_over(self) -> bool:
        """Return whether the members have begun to decide on a view after view()."""
        return self._view is not None and self._native.is_over()

    def away_for(self) -> float:
        """Return for how many seconds the view has been over, as this method has seen it, without
        a recover(): the program is busy elsewhere, or hangs. 0: it is not, or nobody misses it.

        Threads: one at a time.
        """
        is_through = self._leaving or self._ended or self._left
        if self._recovering or is_through or not self.is_over():
            self._over_since = None
            return 0.0
        if self._over_since is None:
            self._over_since = monotonic()
        return monotonic() - self._over_since

    def is_leaving(self) -> bool:
        """Return whether leave() has been called."""
        return self._leaving

    def waiting(self) -> list[str]:
        """Return who waits to be taken in, "host, pid 7" each: a hint; others may know more."""
        return self._native.waiting()

    def name_of(self, member: str) -> str:
        """Return "host, pid 7" for a member's id."""
        return self._native.name_of(member)

    def log(self, line: str) -> None:
        """Write a line to the log, at level INFO. It names the job."""
        self._native.log(line)

    def count_steps(self, committed: int) -> None:
        """Say how many steps the run has committed by now: for events, and for those who ask how
        the job is. Does not block. steps() calls it.
        """
        self._steps = committed
        self._native.note_steps(committed)

    def recover(
        self,
        timeout: timedelta | None = None,
        *,
        patience: timedelta | None = None,
        without_quorum: bool = False,
    ) -> View:
        """Wait for a view after view(), and begin a generation of every managed group in it.

        The first call awaits the first view. Later ones ask for the next: after a failure, or at a
        boundary where agree() told all members so (Answer.changes_view). Whoever is dead,
        frozen or cut off is left out; who waits is taken in. Blocks up to the timeout.

        Args:
            timeout: None: the job's.
            patience: how long members are waited for that live, and whose program does not call
                recover(); None: until the timeout. After it the next view is without them, if those
                that call it may go on alone: they are more than half of the voters of the last view
                (half: where the view names a witness), `min_size` at least, and hold a copy of
                every shard. Otherwise they wait on.
            without_quorum: True: an operator's word, after NoQuorumError. This member goes on alone
                from view(), in another lineage, whatever the others do. Call it on one member, once
                you know that the others have ended; the rest joins that one anew.

        Raises:
            NoQuorumError: too few voters of the last view are there. At once where so many are
                dead that there will be no quorum.
            ElasticTimeoutError: the members decided on no view until the timeout.
            NoProgressError: nothing succeeded in views in a row of the same members: in three
                where their operations or the names of their groups differ; otherwise for a minute
                and four times the job's limit, by causes other than abort() and leave(). The
                message has the cause. After the second such view a pause comes before each further
                one. Where newcomers have been in no agreement that was ok, they alone raise it.
            LeftOutError: the others went on without this process, or it has called leave().
            JobOverError: the job has ended well, and has not needed this process.
            CommError: members were missing until the timeout.
        """
        self._recovering = True
        try:
            return self._recover(timeout, patience, without_quorum)
        finally:
            self._recovering = False

    def _recover(
        self, timeout: timedelta | None, patience: timedelta | None, without_quorum: bool
    ) -> View:
        before = self._view
        until = monotonic() + (timeout or self.timeout).total_seconds()
        while True:
            self._end_groups_of_view()
            left = timedelta(seconds=max(until - monotonic(), 0.001))
            operator = None if timeout is not None or before is None else self._operator
            found, phases = self._next_view(left, patience, without_quorum, operator)
            without_quorum = False  # said once
            if operator is not None:
                until = max(until, monotonic() + _TRY_AGAIN.total_seconds())
            continuing = before is not None and found["members_continuing"][found["rank"]]
            view = View(**found, continuing=continuing, phases=phases)
            try:
                phases["tables"] = self._follow(view, until)
                break
            except CommError as error:  # another member is lost: there will be another view
                if monotonic() >= until:
                    raise
                how = error.cause.how or str(error)
                self._native.came_to_nothing(_kind_of(error), how, str(error))
            finally:
                self._native.log_view(phases)
        self._view = view
        if self._traceback is not None:
            self._traceback.rank = view.rank
        tally.note_view(
            view.number, view.rank, view.size, view.old_size, sum(view.members_continuing)
        )
        tally.note_phases(phases)
        seconds = {phase: took.total_seconds() for phase, took in phases.items()}
        _events.quorum(view.member, view.rank, view.number, self._steps, view.size, seconds)
        return view

    def _next_view(
        self,
        timeout: timedelta,
        patience: timedelta | None,
        without_quorum: bool,
        operator: Operator | None,
    ) -> tuple[ViewFields, dict[str, timedelta]]:
        """As the native recover(). With an operator the loss of a quorum is no end: the member
        waits for a word, and tries now and then whether the missing have come back.
        """
        lost = False
        while True:
            try:
                return self._native.recover(timeout, patience, without_quorum)
            except (CommError, ElasticTimeoutError, NoQuorumError) as error:
                lost = lost or isinstance(error, NoQuorumError)
                if operator is None or not lost:
                    raise
                without_quorum = operator.has_spoken(error, self._native.formed_view())
                timeout = _TRY_AGAIN

    def _follow(self, view: View, until: float) -> timedelta:
        """Bring torch's tables up to date with that view, and make groups by rules, until then.

        Returns how long it took.
        """
        began = monotonic()
        backends = [one for many in self._managed.values() for one in many]
        _tables.follow(self.group, backends, self._native.store_of(view.number), view.number)
        for name, rule in sorted(self._rules.items()):
            self._apply(name, list(rule(view)), view, until)
        return timedelta(seconds=monotonic() - began)

    def _apply(self, name: str, ranks: list[int], view: View, until: float) -> None:
        """Bring the group of a rule into the view, among these members."""
        lasting = self._lasting.get(name)
        if not ranks:
            for backend in () if lasting is None else backends_of(lasting):
                backend.abort(f"this member is in no group {name!r} in view {view.number}")
            return
        unique = f"{name}/{min(ranks)}"
        if lasting is None:
            self._ruled[name] = self._groups_of(view).make(unique, ranks, by_rule=True)
        else:
            left = timedelta(seconds=max(until - monotonic(), 0.001))
            self._groups_of(view).follow(lasting, unique, ranks, left)
            self._ruled[name] = lasting

    def agree(
        self,
        ok: bool,
        note: bytes = b"",
        timeout: timedelta | None = None,
        digest: Digest | None = None,
        *,
        last: bool = False,
    ) -> Answer:
        """Agree with all members of view() on whether all are well; the same answer on all.

        An ok that one member got holds in every later view, also if that member died at once. A
        failure during the call is taken in: the next view then says what the answer is. A call that
        ran out of time is taken up by the next one.

        Args:
            ok: this member's.
            note: bytes for all; 1 MiB divided by the number of members, at most.
            timeout: None: the job's.
            digest: what this member has computed. The answer is ok only if all `common` parts are
                equal, and for each shard all parts of it; else it has `diverged`. Members that give
                none are not compared.
            last: this member says that the run is over after this. Only a word to all, in
                `Answer.last`; nothing follows from it here.

        Raises:
            ValueError: the note, or a part of the digest, is too long; before anything is sent.
            NoQuorumError, LeftOutError: as recover().
            ElasticTimeoutError: no answer by the timeout.
        """
        view = self._view
        if view is None:
            raise RuntimeError("agree: expected a view: call recover() first")
        part = digest or Digest()
        began = monotonic()
        try:
            found = self._native.agree(
                ok, note, timeout or self.timeout, part.common, part.of_shard, part.shard, last
            )
        finally:
            tally.note_agreement(monotonic() - began)
        notes = found["notes"]
        return Answer(
            ok=found["ok"],
            lost=tuple(member for member in view.members if member not in notes),
            notes=tuple(notes.get(member, b"") for member in view.members),
            waiting=tuple(found["waiting"]),
            leaving=tuple(found["leaving"]),
            new_witness=found["new_witness"],
            diverged=found["diverged"],
            last=found["last"],
        )

    def check(self) -> None:
        """Raise the failure of any managed group, or of one of make_group(), once all of their
        device operations are over.
        """
        of_view = [] if self._of_view is None else self._of_view.backends()
        for backend in (*(one for many in self._managed.values() for one in many), *of_view):
            backend.check()

    def abort(self, reason: str) -> None:
        """Fail the generations of all managed groups, and end the view: no member waits for this
        one, in make_group() or agree() neither. All members recover() then.
        """
        self._native.abort(reason)
        if self._of_view is not None:
            self._of_view.abort(reason)

    def _end_groups_of_view(self) -> None:
        of_view, self._of_view = self._of_view, None
        self._ruled.clear()
        if of_view is not None:
            of_view.end()

    def leave(self) -> None:
        """Say that this member goes: from the next agree() on all know, and the next view is
        without it. recover() returns no view from now on, but by `without_quorum`: it raises
        LeftOutError, or NoQuorumError where no next view comes; steps() ends instead of the first.
        A process that is in no view yet ends its wait for one at once, by LeftOutError.

        Threads: any, and handlers of signals. Does not block.
        """
        self._leaving = True
        self._native.set_leaving()

    def end(self, *, agreed: bool = True) -> None:
        """Say that the job has ended well; steps() does. Processes that come later are told so.

        Call it on every member, after an agree() that was ok and in which all meant that. It is
        recorded in the job's store: from then on join(), and a spare's recover(), raise
        JobOverError. Blocks up to 2 s where the store does not answer; the end is then not on
        record, and a line in the log says so. A job without a store has no such record: a process
        that comes to a listed member is told of the end until that member closes.

        Args:
            agreed: False: this member alone knows that the run is over. Nothing is recorded.
        """
        self._ended = True
        if agreed:
            self._native.record_end(_RECORD_WITHIN)

    def has_ended(self) -> bool:
        """Return whether end() has been called here: the job is over, as far as this member knows.
        steps() that ended for another reason, such as leave(), has not called it.
        """
        return self._ended

    def close(self) -> None:
        """Say goodbye and end this member's threads. Idempotent; called at exit too.

        The groups that the job manages are shut down first, the default group among them: members
        that wait for this one in an operation are released at once. Blocks for 2 s at most.
        """
        with self._lock:
            if self._left:
                return
            self._left = True
        atexit.unregister(self._leave_at_exit)
        if self._of_view is not None:
            self._of_view.close()
        self._native.leave(_LEAVE_WITHIN)
        _current.forget(self)

    def _leave_at_exit(self) -> None:
        if os.getpid() == self._process:
            self.close()
