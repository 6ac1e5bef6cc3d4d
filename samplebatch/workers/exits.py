"""WorkerExit: how a rollout worker came to an end before its work was done."""

from __future__ import annotations

from samplebatch.errors import SampleBatchError


class WorkerExit(Exception):
    """A worker has failed, died or been found hanging; everything that it sent has been received.

    Attributes
    ----------
    how
        How it ended.
    why
        Its reason, if it gave one.
    details
        More of that, such as a traceback.
    """

    def __init__(self, how: str, why: str = "", details: str = "") -> None:
        super().__init__(how)
        self.how = how
        self.why = why
        self.details = details


def word_failure(error: Exception) -> str:
    """Word why a worker failed, for `WorkerExit.why`: errors of others are named by their class.

    >>> word_failure(KeyError("obs"))
    "KeyError: 'obs'"
    """
    return str(error) if isinstance(error, SampleBatchError) else f"{type(error).__name__}: {error}"
