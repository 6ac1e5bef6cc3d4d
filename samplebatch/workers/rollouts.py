"""Sources of steps for trainers: a collector in this process, or workers with the newest weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplebatch.rollout.statistics import CollectStats
from samplebatch.workers.workers import RolloutWorkers


class Rollouts:
    """Source of steps for trainers: a collector in this process, with the learner's policy object.

    - `buffer`: buffer of the steps; None for a test collector.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.buffer: Any = getattr(source, "buffer", None)

    def reset(self, *, reset_buffer: bool) -> None:
        """Start new episodes if the source supports it, and empty the buffer if requested."""
        self._source.reset(reset_buffer=reset_buffer)

    def begin(self, n_step: int | None, n_episode: int | None) -> None:
        """Start to collect in the background if possible; the next `collect` must request the same amount."""
        return None

    def collect(self, n_step: int | None, n_episode: int | None) -> CollectStats[Any]:
        """Collect into the buffer with the newest policy."""
        stats: CollectStats[Any] = self._source.collect(n_step=n_step, n_episode=n_episode)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the source, without the buffer's."""
        return dict(self._source.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Restore the state of an equally created source."""
        self._source.load_state_dict(state, allow_pickle=allow_pickle)

    def clear(self) -> None:
        """Empty the buffer after an update; unfinished episodes continue."""
        self.buffer.reset(keep_statistics=True)


class WorkerRollouts(Rollouts):
    """Rollouts of workers, which load the newest weights before they collect.

    - `workers`: started workers with a buffer; or, if asynchronous, any source with the methods `publish` and
      `receive`, such as `RemoteActors`.
    - `policy`: the learner's policy, a torch module; workers have copies.
    - `is_asynchronous`: whether workers continue between two calls of `collect`.
    """

    def __init__(self, workers: Any, policy: Any, *, is_asynchronous: bool = False) -> None:
        super().__init__(workers)
        self._policy, self._is_asynchronous = policy, is_asynchronous
        self._begun: tuple[int | None, int | None] | None = None
        self._held: CollectStats[Any] | None = None
        """Report on steps in the buffer that no call of `collect` has returned yet."""

    def reset(self, *, reset_buffer: bool) -> None:
        """Empty the buffer if requested; workers start new episodes when they are started."""
        if reset_buffer:
            self.buffer.reset()

    def begin(self, n_step: int | None, n_episode: int | None) -> None:
        """Publish the policy's weights and start collecting; fragments are queued in shared memory."""
        self._source.publish(self._policy.state_dict())
        self._source.request(n_step, n_episode)
        self._begun = n_step, n_episode

    def collect(self, n_step: int | None, n_episode: int | None) -> CollectStats[Any]:
        """Receive the steps requested by `begin`, or collect with the newest weights."""
        stats, self._held = self._held, None
        if stats is None:
            if self._begun is None:
                self._source.publish(self._policy.state_dict())
            self._begun = None
            stats = self._source.receive(n_step) if self._is_asynchronous else super().collect(n_step, n_episode)
        # Copies of the policy computed these steps; the schedules of the policy use its own step count.
        if stats.policies:
            for policy_id, policy_stats in stats.policies.items():
                self._policy[policy_id].note_steps(policy_stats.n_collected_steps)
        else:
            self._policy.note_steps(stats.n_collected_steps)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Wait for steps in flight, and return the state of all workers."""
        if self._begun is not None:
            self._held = super().collect(*self._begun)
            self._begun = None
        if self._is_asynchronous:
            arrived = self._source.receive()
            if arrived.n_collected_steps:
                self._held = arrived
        return super().state_dict() | {"held": self._held}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Restore the state of all workers."""
        super().load_state_dict(state, allow_pickle=allow_pickle)
        self._held = state["held"]


def make_rollouts(source: Any, policy: Any, *, is_asynchronous: bool = False) -> Rollouts:
    """Create the rollouts of a collector or of workers."""
    if isinstance(source, RolloutWorkers) or is_asynchronous:
        return WorkerRollouts(source, policy, is_asynchronous=is_asynchronous)
    return Rollouts(source)
