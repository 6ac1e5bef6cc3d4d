"""SharedWeights: the newest weights of a run in shared memory, for workers on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplebatch.policy.source import weights_nbytes
from samplebatch.transport.broadcast import broadcast
from samplebatch.transport.publisher import Publisher
from samplebatch.transport.subscription import Publication, Subscription
from samplebatch.workers.backend import BackendOptions, Weights


class SharedWeights(Weights):
    """A broadcast of weights, made when it is first used.

    Parameters
    ----------
    options
        The policy, which tells how much room its weights need.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._nbytes = max(weights_nbytes(options.policy), options.capacity_bytes or 0)
        self._ends: tuple[Publisher, Subscription] | None = None

    @property
    def subscription(self) -> Subscription:
        """The end that workers read at."""
        return self.open()[1]

    @property
    def version(self) -> int:
        """How many weights have been published."""
        return self.open()[0].version

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Publish weights; see `Weights.publish`."""
        return self.open()[0].publish(weights)

    def latest(self) -> Publication:
        """Copy the newest weights."""
        return self.open()[1].latest()

    def open(self) -> tuple[Publisher, Subscription]:
        """Return both ends.

        Raises
        ------
        SharedMemoryError
            If so much memory is not free.
        """
        if self._ends is None:
            self._ends = broadcast(self._nbytes)
        return self._ends

    def close(self) -> None:
        """Close both ends; later publications are refused."""
        for end in self._ends or ():
            end.close()
