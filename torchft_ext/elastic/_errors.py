"""What the members of an elastic job raise when they cannot go on together.

===================  ========================================================================
class                what to do
===================  ========================================================================
NoQuorumError        too few members are left to decide: start the missing ones again, or found
                     a new job from a checkpoint
NoProgressError      views of the same members come to nothing, for a cause that does not pass:
                     mend it; the text has it
ElasticTimeoutError  members that live did not come, or did not vote, by the deadline: see what
                     they do; recover(patience=...) goes on without them
LeftOutError         the others went on without this process: join again, with a new member id
JobOverError         the job has ended well: nothing is left to do
StateLostError       no member has a whole copy of the state: found a new job from a checkpoint
DivergenceError      members hold different state or gradients: find the difference in the
                     program (a model without DDP, an update without all ranks, a seed); where
                     they have committed different state, go back to a checkpoint
RepeatedError        an exception of the program ended one member after the other in the same
                     step: mend its cause (a full disk, say), and found a new job from a
                     checkpoint
===================  ========================================================================

None of them is a CommError: beginning another generation does not help.
"""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = [
    "DivergenceError",
    "ElasticError",
    "ElasticTimeoutError",
    "JobOverError",
    "LeftOutError",
    "NoProgressError",
    "NoQuorumError",
    "RepeatedError",
    "StateLostError",
]


class ElasticError(RuntimeError):
    """The job cannot go on, or not with this process. Base of the errors of torchft_ext.elastic."""


class ElasticTimeoutError(ElasticError):
    """Members were missing until a deadline; the message names them."""


class NoQuorumError(ElasticError):
    """Too few members of the last view are left to decide on a next one."""


class NoProgressError(ElasticError):
    """Nothing succeeds in views of the same members, for a cause that does not pass.

    The message has the cause: the members issue different operations, as a rule.
    """


class LeftOutError(ElasticError):
    """The other members went on in a view without this process."""


class JobOverError(ElasticError):
    """The job has ended well, before this process came, or before it was needed.

    Its members agreed on the end, and recorded it in the job's store. Another run is another name.

    Attributes:
        ended_at: when, in UTC, by the clock of the member that recorded it.
        members: by how many: those of the last view.
    """

    def __init__(self, message: str = "", ended_at: float = 0.0, members: int = 0) -> None:
        """The time in seconds since 1970."""
        super().__init__(message)
        self.ended_at = datetime.fromtimestamp(ended_at, UTC)
        self.members = members


class StateLostError(ElasticError):
    """No member of the view has a whole copy of the replicated state."""


class DivergenceError(ElasticError):
    """Members hold different replicated state, or would commit different steps.

    Attributes:
        path: what differs first, such as ``"model/fc.weight"``; in a step ``"gradient of ..."``;
            empty where that was not found out.
        ranks: those of the view that differ there from the source, or from most of the others.
    """

    def __init__(self, message: str = "", *, path: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.ranks = ranks


class RepeatedError(ElasticError):
    """An exception of the program ended two members, one after the other, in the same step.

    The message has the exception. It is raised on all members that are left.
    """
