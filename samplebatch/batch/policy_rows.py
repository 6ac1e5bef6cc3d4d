"""PolicyRows: the rows of several policies, cut, gathered and reordered together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.episodes import by_stream, ends_by_change, number_env_steps
from samplebatch.batch.lockstep import Lockstep
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.names import PolicyID

if TYPE_CHECKING:
    import torch

    from samplebatch.batch.delivery import Device
    from samplebatch.batch.multi_agent import MultiAgentBatch
    from samplebatch.batch.targets import Floats, Target


class PolicyRows:
    """Rows of several policies: the part of `MultiAgentBatch` that sees to parts and order."""

    policy_batches: dict[PolicyID, SampleBatch[Any]]
    count: int

    @classmethod
    def _of(cls, policy_batches: dict[PolicyID, SampleBatch[Any]], env_steps: int) -> Self:
        """Make a batch of parts that are known to be sound."""
        new = cls.__new__(cls)
        new.policy_batches = policy_batches
        new.count = env_steps
        return new

    def _to(self, target: Target) -> Self:
        """Convert the columns of every policy to a target's form."""
        return self._of({policy: batch._to(target) for policy, batch in self.policy_batches.items()}, self.count)

    def timeslices(self, k: int) -> list[Self]:
        """Split into parts of k consecutive environment steps, each with the rows of all agents at those steps.

        An environment step is a distinct pair of `eps_id` and `t`; they are taken in order, and rows within a part are
        ordered by `eps_id`, `t` and, where there is one, `agent_index`. A part may hold steps of several episodes;
        policies without rows in a part are left out of it. Parts are views of the batch where its rows are in order
        already, and of one ordered copy of each policy's batch otherwise.

        Parameters
        ----------
        k
            Environment steps in each part, fewer in the last.

        Raises
        ------
        ColumnNotFoundError
            If a policy's batch has no `eps_id` or no `t`.
        ArgumentError
            If k is no whole number from 1 on.

        Examples
        --------
        >>> from samplebatch import MultiAgentBatch, SampleBatch
        >>> batch = MultiAgentBatch(
        ...     {
        ...         "one": SampleBatch(obs=[11, 12, 13], t=[1, 2, 3], eps_id=[0, 0, 0]),
        ...         "two": SampleBatch(obs=[21, 23], t=[1, 3], eps_id=[0, 0]),
        ...         "three": SampleBatch(obs=[33], t=[3], eps_id=[0]),
        ...     },
        ...     env_steps=3,
        ... )
        >>> for part in batch.timeslices(2):
        ...     print(part.count, {policy: rows["obs"].tolist() for policy, rows in part.items()})
        2 {'one': [11, 12], 'two': [21]}
        1 {'one': [13], 'two': [23], 'three': [33]}
        """
        whole("k", k, 1)
        return [self._of(parts, steps) for parts, steps in Lockstep(self.policy_batches).parts(k)]

    def _cut(self, key: slice) -> Self:
        """View the environment steps of a slice; gather them where it has a step."""
        steps = Lockstep(self.policy_batches)
        start, stop, step = key.indices(steps.count)
        if step == 1:
            return self._of(steps.part(start, stop), max(0, stop - start))
        wanted = np.arange(start, stop, step)
        return self._of(steps.take(wanted), len(wanted))

    def select(self, *keys: str) -> Self:
        """View only the given columns of every policy, in the order asked for.

        Raises
        ------
        ColumnNotFoundError
            If a policy lacks one; lists the near names.

        Examples
        --------
        >>> from samplebatch import MultiAgentBatch, SampleBatch
        >>> batch = MultiAgentBatch({"walker": SampleBatch(obs=[1, 2], rewards=[0.5, 1.0])}, env_steps=2)
        >>> list(batch.select("rewards")["walker"])
        ['rewards']
        """
        return self._of({policy: batch.select(*keys) for policy, batch in self.policy_batches.items()}, self.count)

    def shuffle(self, rng: np.random.Generator | int | None = None) -> Self:
        """Shuffle the rows of each policy by itself, in place; see `SampleBatch.shuffle`.

        Parameters
        ----------
        rng
            A generator or a seed; by default, fresh entropy.

        Returns
        -------
        MultiAgentBatch
            This very batch.

        Raises
        ------
        SequenceError
            If there are sequences that are not padded. No policy's rows have moved then.
        """
        generator = np.random.default_rng(rng)
        shuffled = {policy: batch.copy(shallow=True) for policy, batch in self.policy_batches.items()}
        for batch in shuffled.values():
            batch.shuffle(generator)
        for policy, batch in shuffled.items():
            own = self.policy_batches[policy]
            own._columns, own._window, own._lent = batch._columns, None, False
        return self

    def split_by_episode(self) -> list[Self]:
        """Split into one part per episode, by `eps_id`, in the order in which policies have them first.

        Its `count` is the number of the episode's environment steps, as `t` tells them; without `t`, the most rows of a
        policy. Parts are views where the rows of an episode lie together.

        Raises
        ------
        ColumnNotFoundError
            If a policy's batch has no `eps_id`.

        Examples
        --------
        >>> from samplebatch import MultiAgentBatch, SampleBatch
        >>> batch = MultiAgentBatch(
        ...     {"walker": SampleBatch(eps_id=[7, 7, 8], t=[0, 1, 0]), "guard": SampleBatch(eps_id=[8], t=[1])}, 4
        ... )
        >>> [(part.count, list(part.policy_batches)) for part in batch.split_by_episode()]
        [(2, ['walker']), (2, ['walker', 'guard'])]
        """
        episodes: dict[Any, dict[PolicyID, SampleBatch[Any]]] = {}
        for policy, batch in self.policy_batches.items():
            for eps_id, part in _split(batch):
                episodes.setdefault(eps_id, {})[policy] = part
        return [self._of(parts, _count_env_steps(parts)) for parts in episodes.values()]

    @overload
    def minibatches(
        self,
        size: int,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        lockstep: bool = False,
        device: None = None,
        floats: Floats | None = None,
    ) -> Iterator[Self]: ...
    @overload
    def minibatches(
        self,
        size: int,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        lockstep: bool = False,
        device: Device,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Iterator[MultiAgentBatch[torch.Tensor]]: ...
    def minibatches(
        self,
        size: int,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        lockstep: bool = False,
        device: Device | None = None,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Any:
        """Yield the batch in parts, every row once an epoch.

        Parameters
        ----------
        size
            Rows of each policy in a part; a policy whose rows are used up is left out of the rest of an epoch. In
            lockstep, environment steps in a part, fewer in the last of an epoch.
        epochs, shuffle, rng, device, floats, prefetch
            As for `SampleBatch.minibatches`.
        lockstep
            Whether a part has the rows of all agents at its environment steps, as centralised critics need them,
            rather than rows of each policy by itself. An environment step is a distinct pair of `eps_id` and `t`; the
            rows of a policy come step by step, by `agent_index` where there is one.

        Raises
        ------
        ArgumentError, DeviceError
            As `SampleBatch.minibatches` does.
        ColumnNotFoundError
            If, in lockstep, a policy's batch has no `eps_id` or no `t`.
        SequenceError
            If, in lockstep, rows that are sequences are to be shuffled.

        Examples
        --------
        >>> from samplebatch import MultiAgentBatch, SampleBatch
        >>> steps = {"t": [0, 1, 2], "eps_id": [0, 0, 0]}
        >>> batch = MultiAgentBatch({"walker": SampleBatch(steps), "guard": SampleBatch(steps)}, env_steps=3)
        >>> for part in batch.minibatches(2, rng=1, lockstep=True):
        ...     print(part.count, part["walker"]["t"].tolist(), part["guard"]["t"].tolist())
        2 [0, 1] [0, 1]
        1 [2] [2]
        """
        size, epochs = whole("size", size, 1), whole("epochs", epochs)
        delivery = Delivery(device, floats, prefetch)
        generator = np.random.default_rng(rng) if shuffle else None
        if lockstep:
            steps = Lockstep(self.policy_batches)
            parts = (part for _ in range(epochs) for part in self._epoch_in_lockstep(steps, size, generator))
        else:
            parts = (part for _ in range(epochs) for part in self._epoch(size, generator))
        return delivery.each(parts, lambda part, target: part._to(target))

    def _epoch(self, size: int, rng: np.random.Generator | None) -> Iterator[Self]:
        """Yield every row of each policy once."""
        policies = list(self.policy_batches)
        for parts in zip_longest(*(batch._epoch(size, rng) for batch in self.policy_batches.values())):
            present = {policy: part for policy, part in zip(policies, parts, strict=True) if part is not None}
            yield self._of(present, max(part.count for part in present.values()))

    def _epoch_in_lockstep(self, steps: Lockstep, size: int, rng: np.random.Generator | None) -> Iterator[Self]:
        """Yield the rows of every environment step once."""
        if rng is None:
            for parts, count in steps.parts(size):
                yield self._of(parts, count)
            return
        order = rng.permutation(steps.count)
        for start in range(0, steps.count, size):
            wanted = order[start : start + size]
            yield self._of(steps.take(wanted), len(wanted))


def _split(batch: SampleBatch[Any]) -> Iterator[tuple[Any, SampleBatch[Any]]]:
    """Yield the id and the rows of each episode, in the order in which they begin."""
    if batch.zero_padded:
        batch = batch._unpad()
    ids: npt.NDArray[Any] = np.asarray(batch[names.EPS_ID])
    if len(set(ids.tolist())) < len(ends_by_change(ids)):
        _, first, episode = np.unique(ids, return_index=True, return_inverse=True)
        batch = batch.take(by_stream(first[episode.reshape(-1)]))
        ids = np.asarray(batch[names.EPS_ID])
    start = 0
    for stop in ends_by_change(ids):
        yield ids[start].item(), batch.slice(start, stop)
        start = stop


def _count_env_steps(parts: dict[PolicyID, SampleBatch[Any]]) -> int:
    """Count the environment steps of one episode."""
    if not all(names.T in part for part in parts.values()):
        return max(part.count for part in parts.values())
    t = np.concatenate([np.asarray(part[names.T]) for part in parts.values()])
    return len(number_env_steps(np.zeros_like(t), t).episode)
