"""What can happen to a rank, and what the others must be told: the table of the failure matrix."""

from __future__ import annotations

from dataclasses import dataclass

HEARTBEAT = 0.3  # seconds; the limit of all ranks of the matrix at scale 1
DEATH = 0.1  # seconds from a strike to the last survivor's release, by the project's fourth promise
CONFIGURE_LIMIT = 2.0  # seconds; of every configure() that may fail

LOST = frozenset({"peer lost"})
LEFT = frozenset({"peer left"})
ENDED = "its process ended"
LEAVING = "it left before"
STOPPED = r"has not answered for .*\(state T: stopped by a signal\)"
SAID = "the matrix said so"  # abort()'s reason
DUMPING = ENDED + "|has not answered"  # a core that takes long is named, see kernel.py
CUT_LIVENESS = "its connection was cut"
CUT = "the connection broke although its process lives|its connection was cut"
# Seconds more while a generation forms: nobody holds a liveness connection yet, ports are asked
# every 25 ms, and what one member sees travels through the store.
PROBING = 0.1


@dataclass(frozen=True)
class Strike:
    """One way in which a rank fails.

    Attributes:
        name: on the command line and in reports.
        kinds: the kinds of failure a survivor may report.
        how: what its error must say of how it was known, as a pattern.
        bound: seconds from the strike to the last survivor's release; with silent: after the
            heartbeat limit.
        silent: heartbeats alone may tell.
        signal: sent to the victim's process, or None.
        command: said to the victim on its standard input, or None.
        survives: the victim's process lives on and can come back (after a thaw, where it was
            stopped).
        victim_named: the cause must name the victim (else: one of the two ends of the cut liveness
            connection).
    """

    name: str
    kinds: frozenset[str]
    how: str
    bound: float
    signal: int | None = None
    command: str | None = None
    silent: bool = False
    survives: bool = False
    victim_named: bool = True


# A cut_liveness is that of a liveness connection: no case of `configure` has it, since liveness
# connections belong to generations that stand. What is not in this table:
#   oom, big_core   the kernel's doing, in a cgroup and with a core of 1 GiB: peer lost, see
#                   kernel.py
#   store_killed, store_frozen   no rank fails: see STORE_STRIKES, below
#   two ranks at once, or one after the other   peer lost, see pairs.py
#   the end of a Python interpreter, by the end of its script, sys.exit() or an exception that nobody catches   peer
#              left: Python's exit hooks say goodbye first, see tests/python/process/test_process.py.
#              `exception`, here, is one of C++, which ends in std::terminate() without a word.
#
# Wider than the promise, each for a reason that is not hidden in a scale factor:
#   timeout    50 ms of it are the operation's own limit
#   cut_connection   the engine's connections; the process is asked whether it lives before the
#              connection is blamed. A route that is gone for good cannot be played here: see
#              MonitorStories in tests/cpp
#   exception, core_dump    a core may be written before anything is closed: only heartbeats tell
# Cases of `configure` have PROBING added. Three differ more:
#   exit       also a death: an exit handler says goodbye, but who waits in the store has no
#              connection that would carry it, and asks a process that has ended by then
#   shutdown   it falls between two configure() as a rule, or into one; between them nobody is told
#              that the member will not come, until the deadline: see limits.md
#   abort      it may end a generation that some have left for the next one already: those it tells
#              stay away, alive, and if rank 0 is among them, the others wait for it until the
#              deadline. Who is in one attempt with rank 0 is told
STRIKES: dict[str, Strike] = {
    strike.name: strike
    for strike in (
        Strike("sigkill", LOST, ENDED, DEATH, signal=9),
        Strike("sigstop", LOST, STOPPED, DEATH, signal=19, silent=True, survives=True),
        Strike("core_dump", LOST, DUMPING, DEATH, command="die abort", silent=True),
        Strike("os_exit", LOST, ENDED, DEATH, command="die _exit"),
        Strike("exec", LOST, ENDED, DEATH, command="die exec"),
        Strike("exception", LOST, DUMPING, DEATH, command="die exception", silent=True),
        Strike("exit", LEFT, LEAVING, DEATH, command="die exit"),
        Strike("shutdown", LEFT, LEAVING, DEATH, command="shutdown"),
        Strike("abort", frozenset({"aborted"}), SAID, DEATH, command="abort", survives=True),
        Strike(
            "timeout",
            frozenset({"timeout"}),
            r"recv #\d+ did not complete within",
            DEATH + 0.05,
            command="timeout 50",
            survives=True,
        ),
        Strike(
            "cut_liveness",
            frozenset({"connection lost"}),
            CUT_LIVENESS,
            DEATH,
            survives=True,
            victim_named=False,
        ),
        Strike(
            "cut_connection",
            frozenset({"connection lost"}),
            CUT,
            DEATH + 0.1,
            survives=True,
            victim_named=False,
        ),
    )
}

# The store fails, no rank does: running operations succeed, configure() raises. What it raises comes by number: a
# server that cannot be reached is lost, one that does not answer takes configure() to its limit.
STORE_STRIKES: dict[str, int] = {"store_killed": 9, "store_frozen": 19}
STORE_KINDS: dict[int, frozenset[str]] = {
    9: frozenset({"store lost"}),
    19: frozenset({"timeout"}),
}

# As a member sees it that does not wait for the store itself.
STORE_FORMING: dict[int, frozenset[str]] = {
    number: kinds | {"timeout", "peer left", "aborted"} for number, kinds in STORE_KINDS.items()
}

# What the members may be told while a generation forms, where that is not the table's. A timeout
# comes at the deadline of configure(), and names who did not come.
FORMING: dict[str, frozenset[str]] = {
    "exit": frozenset({"peer lost", "peer left", "aborted"}),
    "shutdown": frozenset({"peer left", "aborted", "timeout"}),
    "abort": frozenset({"aborted", "timeout"}),
    "cut_connection": frozenset({"connection lost", "timeout"}),
}
# And how it was known, where that is not the table's.
SHUT_DOWN = rf"{LEAVING}|it shut its group down|shutdown\(\) was called"
FORMING_HOW: dict[str, str] = {"exit": f"{ENDED}|{SHUT_DOWN}", "shutdown": SHUT_DOWN}
# Strikes after which all who are left may run out of time; of every other one somebody is told.
UNTOLD = frozenset({"shutdown"})
OPERATIONS = (
    "allreduce",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "barrier",
    "sendrecv",
    "configure",
)
WORLDS = (2, 3, 4, 5, 8)
# What a process may be told that wakes in a configure() which the others have left for another one,
# but for that it was left out: that a connection was closed by a process that lives, or, at the
# deadline, who did not come. That it had not run meanwhile is said where that was within the same
# configure(): see test_heartbeat.py.
OVERTAKEN = frozenset({"connection lost", "timeout"})
# When a frozen process wakes: before the others form a generation without it, or once that
# generation works.
THAWS = ("first", "later")


def victims(world: int) -> tuple[int, ...]:
    """First, last, and one between where there is one."""
    return (0, world - 1) if world == 2 else (0, world // 2, world - 1)
