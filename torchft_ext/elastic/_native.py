"""What the native part returns, as its stub names it."""

from __future__ import annotations

from typing import TypedDict


class ViewFields(TypedDict):
    """Of a view; see View."""

    number: int
    lineage: bytes
    rank: int
    founder: bool
    size: int
    old_size: int
    members: tuple[str, ...]
    members_continuing: tuple[bool, ...]


class AnswerFields(TypedDict):
    """Of an answer; see Answer. Notes by member."""

    ok: bool
    notes: dict[str, bytes]
    waiting: list[str]
    leaving: list[str]
    new_witness: bool
    diverged: bool
    last: bool


class ProcessFields(TypedDict):
    """One process of a job. The id is in hex."""

    id: str
    host: str
    pid: int


class MemberState(ProcessFields):
    """A member of the newest view, or a newcomer.

    Keys:
        since_view: the number of the view that took it in.
        seconds: since the member that answered first saw it in a view.
        voter: it decides on the next view; else it is a learner, or a newcomer.
        may_be_lost: the others could decide on a view without it now.
        trouble: how it was lost, as that member knows; empty: it knows nothing of that kind.
        answers: its port answers; None: it was not asked.
    """

    since_view: int
    seconds: float
    voter: bool
    may_be_lost: bool
    trouble: str
    answers: bool | None


class ChangeFields(TypedDict):
    """A view that began; who joined, and who is not in it any more, with the cause.

    `phases` has the seconds that the member that answered spent in each, until its groups stood.
    """

    view: int
    size: int
    seconds_ago: float
    joined: list[str]
    gone: list[str]
    phases: dict[str, float]


class StepsFields(TypedDict):
    """How far the member that answered is, and how fast its last steps came."""

    committed: int
    seconds_ago: float
    per_second: float


class ReportFields(TypedDict):
    """What one member told of the job.

    Keys:
        by, by_role: that process, and whether it is a "member", "left out" or a "newcomer".
        deciding: the members decide on the next view.
        witness: the view names the store as a voice.
        size: of the view; `members` may list fewer.
        may_lose: so many voters may be lost at once, whichever they are.
        waiting: newcomers.
        waits: whom the member that answered waits for, each in a clause.
    """

    by: ProcessFields
    by_role: str
    lineage: str
    view: int
    deciding: bool
    rule: str
    min_size: int
    max_size: int
    witness: bool
    size: int
    may_lose: int
    members: list[MemberState]
    waiting: list[MemberState]
    changes: list[ChangeFields]
    waits: list[str]
    steps: StepsFields | None


class MeetingFields(TypedDict):
    """What the place holds where the job is found.

    Keys:
        trouble: why it could not be read; empty: it was.
        founded: the job has been.
        come: how many processes have come, before that.
        founders: of a founded job.
        contacts: members of a late view, which newcomers ask.
        voted_for: the number of the view that its register voted for last; None: there is no
            register.
        is_witness: it is the store that the view names.
    """

    trouble: str
    founded: bool
    come: int
    founders: int
    contacts: int
    voted_for: int | None
    is_witness: bool


class SilentFields(ProcessFields):
    """A process that was asked and told nothing."""

    why: str


class StateFields(TypedDict):
    """What is known of a job by a process that takes no part in it."""

    meeting: MeetingFields
    report: ReportFields | None
    silent: list[SilentFields]
