"""Rollouts: where the steps of a trainer come from, a collector in this process or workers with the newest weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplebatch.rollout.statistics import CollectStats
from samplebatch.workers.workers import RolloutWorkers


class Rollouts:
    """Source of steps for trainers: a collector in this process, with the learner's own policy.

    Attributes
    ----------
    buffer
        Where the steps go; None for a collector that plays tests.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.buffer: Any = getattr(source, "buffer", None)

    def reset(self, *, reset_buffer: bool) -> None:
        """Begin with new episodes where that can be, and with an empty buffer if told so."""
        self._source.reset(reset_buffer=reset_buffer)

    def begin(self, n_step: int | None, n_episode: int | None) -> None:
        """Begin to collect with the newest policy, where that can be done aside; the next `collect` is for as much."""
        return None

    def collect(self, n_step: int | None, n_episode: int | None) -> CollectStats[Any]:
        """Collect into the buffer, by the newest policy."""
        stats: CollectStats[Any] = self._source.collect(n_step=n_step, n_episode=n_episode)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state of who collects; the buffer has its own."""
        return dict(self._source.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Go on where others were that were made alike."""
        self._source.load_state_dict(state, allow_pickle=allow_pickle)

    def clear(self) -> None:
        """Empty the buffer once it was learned from; episodes under way go on."""
        self.buffer.reset(keep_statistics=True)


class WorkerRollouts(Rollouts):
    """Rollouts of workers, which get the newest weights before they collect.

    Parameters
    ----------
    workers
        Workers with a buffer, which have been started; or, if asynchronous, any source with their methods `publish`
        and `receive`, such as `RemoteActors`.
    policy
        The learner's policy, a torch module; theirs are copies of it.
    is_asynchronous
        Whether workers continue by themselves between two calls of `collect`.
    """

    def __init__(self, workers: Any, policy: Any, *, is_asynchronous: bool = False) -> None:
        super().__init__(workers)
        self._policy, self._is_asynchronous = policy, is_asynchronous
        self._begun: tuple[int | None, int | None] | None = None
        self._held: CollectStats[Any] | None = None
        """The report on steps that lie in the buffer, and that no call of `collect` has told of."""

    def reset(self, *, reset_buffer: bool) -> None:
        """Empty the buffer, if told so; workers begin with new episodes when they are started."""
        if reset_buffer:
            self.buffer.reset()

    def begin(self, n_step: int | None, n_episode: int | None) -> None:
        """Publish the policy's weights, and let workers begin; their fragments wait in shared memory."""
        self._source.publish(self._policy.state_dict())
        self._source.request(n_step, n_episode)
        self._begun = n_step, n_episode

    def collect(self, n_step: int | None, n_episode: int | None) -> CollectStats[Any]:
        """Receive the steps that were begun with; if there are none, collect with the newest weights."""
        stats, self._held = self._held, None
        if stats is None:
            if self._begun is None:
                self._source.publish(self._policy.state_dict())
            self._begun = None
            stats = self._source.receive(n_step) if self._is_asynchronous else super().collect(n_step, n_episode)
        # Copies of the policy have made these; its schedules go by its own count.
        if stats.policies:
            for policy_id, own in stats.policies.items():
                self._policy[policy_id].note_steps(own.n_collected_steps)
        else:
            self._policy.note_steps(stats.n_collected_steps)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all workers, once the steps under way have come."""
        if self._begun is not None:
            self._held = super().collect(*self._begun)
            self._begun = None
        if self._is_asynchronous:
            arrived = self._source.receive()
            if arrived.n_collected_steps:
                self._held = arrived
        return super().state_dict() | {"held": self._held}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Load the state of all workers."""
        super().load_state_dict(state, allow_pickle=allow_pickle)
        self._held = state["held"]


def make_rollouts(source: Any, policy: Any, *, is_asynchronous: bool = False) -> Rollouts:
    """Create the rollouts of a collector or of workers."""
    if isinstance(source, RolloutWorkers) or is_asynchronous:
        return WorkerRollouts(source, policy, is_asynchronous=is_asynchronous)
    return Rollouts(source)
