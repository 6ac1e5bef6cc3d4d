"""RemoteActors: source of training steps from actors that write to a queue of a replay service."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ArgumentError, ColumnNotFoundError
from samplebatch.rollout.statistics import CollectStats, RunningStatistics
from samplebatch.service.client import ReplayClient
from samplebatch.workers.pool import StepCount
from samplebatch.workers.workers import BufferWriter


class RemoteActors:
    """Source of steps for an asynchronous trainer, from actors that write to a queue of a replay service.

    Actors may run on any machine. Each actor is a `Collector(policy, env, client, weights=client, worker_index=i)` that
    collects in a loop. The learner publishes weights to the service and trains on fragments in order of arrival. Actors
    may start and stop at any time. A full queue blocks the actors; an empty queue blocks the learner.

    Parameters
    ----------
    client
        Client of a table of kind `"queue"`; `RemoteActors` does not close the client.
    buffer
        Buffer that stores the steps for the next update: a single-agent buffer with one ring per environment id of all
        actors, or a `MultiAgentReplayBuffer`.
    max_lag
        Maximum age of a fragment's weights, in publications of the learner; fragments with older weights are discarded.
        None for no limit.

    Attributes
    ----------
    client, buffer, max_lag
        Values of the arguments.
    version
        Version of the newest weights published by this object; 0 before the first publication.
    stale_fragments, stale_steps
        Numbers of fragments and of environment steps that were discarded because of `max_lag`.

    Raises
    ------
    ArgumentError
        If `client` is not a `ReplayClient`, or `max_lag` is not a non-negative integer.

    Examples
    --------
    >>> from samplebatch import Collector, VectorReplayBuffer
    >>> from samplebatch.service import ReplayServer, ReplayTable
    >>> with (
    ...     ReplayServer([ReplayTable("queue", kind="queue", capacity=8)]) as server,
    ...     ReplayClient(server.uri, "queue") as client,
    ...     Collector("random", "CartPole-v1", client, num_envs=2, weights=client) as actor,
    ... ):
    ...     _ = actor.collect(n_step=50)
    ...     actors = RemoteActors(client, VectorReplayBuffer(100, 2))
    ...     actors.receive(40).n_collected_steps
    50
    """

    def __init__(self, client: ReplayClient, buffer: Any, *, max_lag: int | None = None) -> None:
        if not isinstance(client, ReplayClient):
            raise ArgumentError(f"client must be a ReplayClient, got a {type(client).__name__}")
        self.client, self.buffer = client, buffer
        self.max_lag = None if max_lag is None else whole("max_lag", max_lag)
        self.version = self.stale_fragments = self.stale_steps = 0
        self._writer = BufferWriter(buffer)
        self._episodes = RunningStatistics()
        self._fragments: Iterator[Any] | None = None

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Publish weights for all actors and return the version of the weights.

        Raises
        ------
        ColumnTypeError, CapacityError, ServiceError
            As in `ReplayClient.publish`.
        """
        self.version = self.client.publish(weights)
        return self.version

    def receive(self, n_step: int | None = None) -> CollectStats[Any]:
        """Receive fragments until at least `n_step` environment steps are added to the buffer; return statistics.

        Parameters
        ----------
        n_step
            Minimum number of environment steps; all steps of the last fragment are added. If `n_step` is None, no
            fragment is received and the statistics are empty.

        Raises
        ------
        ArgumentError
            If `n_step` is not a positive integer, or the buffer has no ring for an environment id.
        ColumnNotFoundError
            If `max_lag` is set and a fragment has no column `weights_version`, because its collector does not use
            published weights.
        ServiceError
            If the service cannot be reached.
        """
        start_s, count = time.perf_counter(), StepCount()
        min_steps = 0 if n_step is None else whole("n_step", n_step, 1)
        if self._fragments is None and min_steps:
            self._fragments = self.client.stream()
        while self._fragments is not None and count.env_steps < min_steps:
            fragment = next(self._fragments)
            ended = self._episodes.advance(fragment)
            if self._is_stale(fragment):
                self.stale_fragments += 1
                self.stale_steps += fragment.env_steps()
                continue
            count.add(fragment, ended)
            self._writer.add(fragment)
        return count.report(time.perf_counter() - start_s)

    def state_dict(self) -> dict[str, Any]:
        """Return counts of discarded fragments and statistics of open episodes, without the state of the buffer."""
        return {
            "stale": (self.stale_fragments, self.stale_steps),
            "rings": self._writer.state_dict(),
            "episodes": self._episodes.state_dict(),
            "why_reset": None,
            "environments": [],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Restore the result of `state_dict`. The state contains no pickles, so `allow_pickle` has no effect."""
        self.stale_fragments, self.stale_steps = state["stale"]
        self._writer.load_state_dict(state["rings"])
        self._episodes.load_state_dict(state["episodes"])

    def _is_stale(self, fragment: SampleBatch | MultiAgentBatch) -> bool:
        if self.max_lag is None:
            return False
        batches = fragment.policy_batches.values() if isinstance(fragment, MultiAgentBatch) else [fragment]
        for steps in batches:
            if names.WEIGHTS_VERSION not in steps:
                raise ColumnNotFoundError(
                    f"fragments must have the column {names.WEIGHTS_VERSION!r} for max_lag, got a fragment without "
                    "it; create collectors with weights=client"
                )
            if len(steps) and self.version - int(np.min(np.asarray(steps[names.WEIGHTS_VERSION]))) > self.max_lag:
                return True
        return False
