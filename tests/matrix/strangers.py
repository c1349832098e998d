"""Thousands of hostile connections against a live generation, which must not notice.

While four ranks reduce without pause, every address of theirs (connections over TCP and Unix
sockets, main connections, backup connections) is scanned, fed garbage, held half-open, fed byte by
byte, and lied to by those who know the wire format, the incarnation and even the generation's
nonce, but not its secret. The ranks run under the common limit of 1,024 open files, and hundreds of
the connections are held open.

Must hold: no operation fails, every sum is exact, none takes half a second (at any scale), the
rounds go on at a good part of the rate that they had in peace, another generation forms in the
midst of it, and afterwards each thread's descriptors and the process's memory are where they stood.
"""

from __future__ import annotations

import re
import resource
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from matrix.cases import HANG, Pool, expect_exact_sums, progress
from matrix.process import MatrixError, RankProcess

WORLD = 4
HEARTBEAT = 2.0  # seconds
LONGEST = 0.5  # seconds; of an operation, on two cores that four ranks and the strangers share
PEACE = 2.0  # seconds in which the rate before them is measured
# times at most, by strangers that take one of two cores for themselves: 1.1 to 1.8 were measured
SLOWED = 10
OPEN_FILES = 1024  # of a rank: what most systems allow by default
HELD = 2_000  # connections held open at a time, over all addresses
MEMORY = 16 * 2**20  # bytes; what a rank may grow by, for its allocator's sake
SETTLED = 60.0  # seconds until the last of a siege must be forgotten: parked ones stay 30

FRAMES = Path(__file__).resolve().parents[2] / "csrc" / "net" / "frame.h"
MAGIC = 0x54465831
VERSION = int(re.search(r"kWireVersion = (\d+);", FRAMES.read_text()).group(1))  # type: ignore[union-attr]
HELLO, REFUSED, DATA = 1, 3, 10
WRONG_SECRET, WRONG_VERSION = 2, 5
HEADER = struct.Struct("<IHHQQQQ")


@dataclass
class Target:
    """An address, and what a well-informed stranger knows of who listens there."""

    address: str  # "127.0.0.1:PORT" or "unix:NAME"
    incarnation: bytes
    nonce: bytes

    def dial(self) -> socket.socket:
        """Connect to it."""
        where, _, rest = self.address.partition(":")
        if where != "unix":
            return socket.create_connection((where, int(rest)), timeout=HANG)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(HANG)
        connection.connect("\0torchft_ext-" + rest)
        return connection


@dataclass
class Siege:
    """The strangers.

    Attributes:
        held: open connections, the oldest first.
        kinds: how many there were of each.
        most_descriptors: in one table of one rank, when the most of them waited there.
    """

    targets: list[Target]
    pool: Pool
    held: deque[socket.socket] = field(default_factory=deque)
    kinds: Counter[str] = field(default_factory=Counter)
    most_descriptors: int = 0

    def everywhere(self, count: int) -> None:
        """Make so many connections, of all kinds, to all addresses."""
        for _ in range(count):
            self._connect(self.pool.rng.choice(list(KINDS)), self.pool.rng.choice(self.targets))

    def at_one_address(self, target: Target) -> None:
        """Make as many as are held, all to one address, all of those that wait there the
        longest."""
        self.end()
        for _ in range(HELD):
            self._connect(self.pool.rng.choice(("silent", "unknown generation")), target)

    def _connect(self, name: str, target: Target) -> None:
        self.kinds[name] += 1
        connection = target.dial()
        with suppress(BrokenPipeError, ConnectionResetError):  # turned away already
            KINDS[name](self, target, connection)
        if connection.fileno() >= 0:
            self.held.append(connection)
        while len(self.held) > HELD:
            self.held.popleft().close()

    def end(self) -> None:
        """Close what is open."""
        while self.held:
            self.held.popleft().close()

    def hello(self, target: Target, nonce: bytes) -> bytes:
        """A well-formed one with a made-up proof."""
        rng = self.pool.rng
        proof, sender = rng.randbytes(16), rng.randbytes(16)
        channel = struct.pack("<iB", rng.randrange(WORLD), rng.randrange(2))
        payload = nonce + proof + sender + target.incarnation + channel
        return frame(HELLO, len(payload)) + payload


def frame(kind: int, length: int, version: int = VERSION) -> bytes:
    """A header."""
    return HEADER.pack(MAGIC, version, kind, length, 0, 0, 0)


def _expect_refusal(connection: socket.socket, code: int) -> None:
    with connection:
        answer = b""
        while len(answer) <= HEADER.size:
            more = connection.recv(4096)
            if not more:
                break
            answer += more
    if len(answer) <= HEADER.size:
        raise MatrixError(f"expected a refusal with code {code}, found {answer!r}")
    kind, found = HEADER.unpack_from(answer)[2], answer[HEADER.size]
    if (kind, found) != (REFUSED, code):
        raise MatrixError(f"expected a refusal with code {code}, found frame {kind}, code {found}")


def _scan(_siege: Siege, _target: Target, connection: socket.socket) -> None:
    connection.close()


def _reset(_siege: Siege, _target: Target, connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _garbage(siege: Siege, _target: Target, connection: socket.socket) -> None:
    connection.sendall(siege.pool.rng.randbytes(siege.pool.rng.randrange(1, 4096)))


def _descriptors(siege: Siege, _target: Target, connection: socket.socket) -> None:
    """Pass descriptors along, which a Unix socket would hand to a receiver that asked for them."""
    socket.send_fds(connection, [siege.pool.rng.randbytes(100)], [0] * 5)


def _silent(_siege: Siege, _target: Target, _connection: socket.socket) -> None:
    pass


def _slow(siege: Siege, target: Target, connection: socket.socket) -> None:
    hello = siege.hello(target, target.nonce)
    connection.sendall(hello[: siege.pool.rng.randrange(1, len(hello))])
    for older in list(siege.held)[-3:]:  # and others get one more byte, of whatever kind they are
        older.sendall(b"\0")


def _oversized(_siege: Siege, _target: Target, connection: socket.socket) -> None:
    connection.sendall(frame(HELLO, 2**40) + b"x" * 1000)


def _out_of_turn(_siege: Siege, _target: Target, connection: socket.socket) -> None:
    connection.sendall(frame(DATA, 64) + b"x" * 64)


def _wrong_version(_siege: Siege, _target: Target, connection: socket.socket) -> None:
    connection.sendall(frame(HELLO, 69, VERSION + 1) + b"x" * 69)
    _expect_refusal(connection, WRONG_VERSION)


def _unknown_generation(siege: Siege, target: Target, connection: socket.socket) -> None:
    connection.sendall(siege.hello(target, siege.pool.rng.randbytes(16)))


def _wrong_secret(siege: Siege, target: Target, connection: socket.socket) -> None:
    connection.sendall(siege.hello(target, target.nonce))
    _expect_refusal(connection, WRONG_SECRET)


KINDS = {
    "scan": _scan,
    "reset": _reset,
    "garbage": _garbage,
    "descriptors": _descriptors,
    "silent": _silent,
    "slow": _slow,
    "oversized": _oversized,
    "out of turn": _out_of_turn,
    "wrong version": _wrong_version,
    "unknown generation": _unknown_generation,
    "wrong secret": _wrong_secret,
}


@dataclass
class Standing:
    """What a rank holds: descriptors by thread (some have tables of their own), resident bytes."""

    descriptors: dict[str, int]
    resident: int

    @staticmethod
    def of(rank: RankProcess) -> Standing:
        """As it is now."""
        process = Path(f"/proc/{rank.pid}")
        descriptors = {
            (task / "comm").read_text().strip(): len(list((task / "fd").iterdir()))
            for task in (process / "task").iterdir()
        }
        pages = int((process / "statm").read_text().split()[1])
        return Standing(descriptors, pages * resource.getpagesize())


def _start(pool: Pool) -> list[RankProcess]:
    """Ranks with few descriptors; this process itself needs many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    limit = HEARTBEAT * pool.scale
    ranks = [RankProcess(pool.program, pool.store.address, limit) for _ in range(WORLD)]
    pool.ranks = {limit: ranks}
    for rank in ranks:
        rank.await_ready()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return list(ranks)


def _targets(ranks: list[RankProcess]) -> list[Target]:
    """The addresses of the generation that was begun last, and what strangers could know of it."""
    ranks[0].say("nonce")
    nonce = bytes.fromhex(ranks[0].expect("nonce", HANG)["nonce"])
    return [
        Target(address, bytes.fromhex(rank.incarnation), nonce)
        for rank in ranks
        for address in (*rank.addresses, *rank.liveness_addresses)
    ]


def _expect_settled(pool: Pool, ranks: list[RankProcess], before: list[Standing]) -> None:
    until = time.monotonic() + SETTLED * max(1.0, pool.scale / 10)
    for rank, was in zip(ranks, before, strict=True):
        while (now := Standing.of(rank)).descriptors != was.descriptors:
            if time.monotonic() > until:
                raise MatrixError(
                    f"descriptors by thread: {was.descriptors}, now {now.descriptors}"
                )
            time.sleep(0.1)
        if now.resident > was.resident + MEMORY:
            raise MatrixError(f"resident bytes: {was.resident}, now {now.resident}")


def _rounds_per_second(ranks: list[RankProcess], meanwhile: Callable[[], None]) -> float:
    """Of the rank that made the fewest while that was done."""
    before, began = progress(ranks), time.monotonic()
    meanwhile()
    after, took = progress(ranks), time.monotonic() - began
    return min(now - then for (now, _), (then, _) in zip(after, before, strict=True)) / took


def _besiege(siege: Siege, ranks: list[RankProcess], count: int) -> None:
    """So many strangers everywhere, then as many as are held at each address in turn."""
    while sum(siege.kinds.values()) < count:
        siege.everywhere(250)
        progress(ranks)
    for target in siege.targets:
        siege.at_one_address(target)
        progress(ranks)
        descriptors = max(max(Standing.of(rank).descriptors.values()) for rank in ranks)
        siege.most_descriptors = max(siege.most_descriptors, descriptors)


def _expect_unnoticed(siege: Siege, peace: float, war: float, longest: float) -> None:
    if war * SLOWED < peace:
        raise MatrixError(f"{war:.0f} allreduces a second, {peace:.0f} before the siege")
    if longest > LONGEST:
        raise MatrixError(f"an operation took {longest:.3f} s")
    if siege.most_descriptors > OPEN_FILES // 2:
        raise MatrixError(
            f"strangers hold descriptors: {siege.most_descriptors} of {OPEN_FILES} are in use"
        )


def run_strangers(pool: Pool, count: int) -> int:
    """The siege; 0.

    Raises:
        MatrixError: the generation noticed.
    """
    ranks = _start(pool)
    pool.configure(ranks)
    siege = Siege(_targets(ranks), pool)
    for rank in ranks:
        rank.say("loop allreduce 10000")
    siege.everywhere(200)  # what is made at first use is there now
    siege.end()
    time.sleep(2.5)  # their two seconds for a hello are over
    before = [Standing.of(rank) for rank in ranks]
    peace = _rounds_per_second(ranks, lambda: time.sleep(PEACE))
    war = _rounds_per_second(ranks, lambda: _besiege(siege, ranks, count))
    longest = max(seconds for _, seconds in progress(ranks))
    _expect_unnoticed(siege, peace, war, longest)
    ranks[0].say("abort")
    for rank in ranks:
        rank.expect("failed", HANG)
    expect_exact_sums(pool, ranks)  # a generation forms while the held ones are still there
    siege.end()
    _expect_settled(pool, ranks, before)
    print(f"{sum(siege.kinds.values())} strangers: {dict(sorted(siege.kinds.items()))}")
    print(
        f"{war:.0f} allreduces a second meanwhile, {peace:.0f} before; the longest "
        f"{longest * 1000:.1f} ms; "
        f"at most {siege.most_descriptors} descriptors in a table"
    )
    return 0
