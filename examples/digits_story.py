"""What happens to the workers: each act awaits what the last one led to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

KILLED, FROZEN, KILLED_LATER = 1, 2, 3  # of the founders, 0 to 3; worker 0 has a quiet life
SPARE, NEWCOMER = 4, 5  # held until they are admitted

Cue = Callable[[], bool]  # the story goes on when it is true
Story = Callable[["Stage"], Iterator[Cue]]


class Stage(Protocol):
    """What an act can do and wait for; the launcher is one."""

    def admit(self, worker: int) -> None: ...
    def kill(self, worker: int) -> None: ...
    def freeze(self, worker: int) -> None: ...
    def thaw(self, worker: int) -> None: ...
    def kill_store(self) -> None: ...

    def in_mid_step(self, worker: int) -> Cue:
        """Make it pause in its next step; true when it does."""

    def after_a_while(self) -> Cue:
        """Some more steps are committed."""

    def waits(self, worker: int) -> Cue:
        """It has come to the job since its last act, with its model built: it awaits a place."""

    def trains(self, worker: int) -> Cue:
        """It has committed a step since its last act."""

    def world_is(self, size: int) -> Cue:
        """The last committed step was one of so many members."""


def undisturbed(_: Stage) -> Iterator[Cue]:
    yield from ()


def disturbed(stage: Stage) -> Iterator[Cue]:
    yield stage.world_is(4)
    stage.admit(SPARE)  # it waits, warm: the world is full
    yield stage.waits(SPARE)
    yield stage.after_a_while()

    yield stage.in_mid_step(KILLED)
    stage.kill(KILLED)
    yield stage.trains(SPARE)
    yield stage.after_a_while()

    yield stage.in_mid_step(FROZEN)
    stage.freeze(FROZEN)
    yield stage.world_is(3)
    yield stage.after_a_while()

    stage.admit(NEWCOMER)
    yield stage.trains(NEWCOMER)
    yield stage.after_a_while()

    stage.thaw(FROZEN)  # the others went on without it; it joins again, and waits as a spare
    yield stage.waits(FROZEN)
    yield stage.after_a_while()

    stage.kill_store()  # three of four members are a quorum
    yield stage.after_a_while()

    yield stage.in_mid_step(KILLED_LATER)
    stage.kill(KILLED_LATER)
    yield stage.trains(FROZEN)
