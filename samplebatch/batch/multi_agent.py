"""MultiAgentBatch: one SampleBatch per policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
from samplebatch.arguments import suggest_names, whole
from samplebatch.batch import arrow, bulk, summary
from samplebatch.batch.delivery import Delivery, each_part
from samplebatch.batch.episodes import by_stream, ends_by_change, ends_in, number_env_steps
from samplebatch.batch.flags import missing_columns_of_agents
from samplebatch.batch.sample_batch import OBSERVATIONS, SampleBatch, ValuesT
from samplebatch.batch.sequences import steps_of, unpadded
from samplebatch.column.interface import Indices
from samplebatch.names import PolicyID

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch
    from matplotlib.figure import Figure

    from samplebatch.batch.delivery import Device, Floats, Target
    from samplebatch.batch.sample_batch import SampleBatch


class MultiAgentBatch(Generic[ValuesT]):
    """Steps of several agents, one `SampleBatch` per policy.

    `batch["walker"]` returns the batch of policy `walker`; assignment replaces this batch. `batch[2:5]` views the
    environment steps 2 to 4, with the rows of all agents.

    Parameters
    ----------
    policy_batches
        Batch of each policy, by policy id (string or integer). The dict is stored without a copy.
    env_steps
        Number of environment steps; each environment step has at least one agent step.

    Attributes
    ----------
    policy_batches
        Batch of each policy, by policy id.
    count
        Number of environment steps.

    Raises
    ------
    ColumnTypeError
        If a policy id is neither a string nor an integer, or a policy's batch is not a `SampleBatch`.
    ArgumentError
        If `policy_batches` is not a dict, or `env_steps` is not a non-negative integer.

    Examples
    --------
    >>> batch = MultiAgentBatch(
    ...     {"walker": SampleBatch(obs=[1, 2]), "guard": SampleBatch(obs=[3])}, env_steps=2
    ... )
    >>> batch["walker"]["obs"].tolist(), batch.env_steps(), batch.agent_steps()
    ([1, 2], 2, 3)
    """

    policy_batches: dict[PolicyID, SampleBatch[ValuesT]]
    vars().update(missing_columns_of_agents())

    @suggest_names(count="env_steps")
    def __init__(self, policy_batches: dict[PolicyID, SampleBatch[ValuesT]], env_steps: int) -> None:
        if not isinstance(policy_batches, dict):
            raise errors.ArgumentError(
                "policy_batches must be a dict of a SampleBatch for each policy id, such as "
                f"{{'default_policy': batch}}, got a {type(policy_batches).__name__}"
            )
        for policy, batch in policy_batches.items():
            _check_policy(policy, batch)
        self.policy_batches = policy_batches
        self.count = whole("env_steps", env_steps)

    @classmethod
    def _of(cls, policy_batches: dict[PolicyID, SampleBatch[Any]], env_steps: int) -> Self:
        """Create a batch without validation."""
        new = cls.__new__(cls)
        new.policy_batches = policy_batches
        new.count = env_steps
        return new

    def env_steps(self) -> int:
        """Return the number of environment steps."""
        return self.count

    def __len__(self) -> int:
        return self.count

    def agent_steps(self) -> int:
        """Return the total number of steps of all agents."""
        return sum([batch.count for batch in self.policy_batches.values()])

    @overload
    def __getitem__(self, policy: str | int) -> SampleBatch[ValuesT]: ...
    @overload
    def __getitem__(self, policy: slice) -> Self: ...
    def __getitem__(self, policy: PolicyID) -> Any:
        if isinstance(policy, slice):
            return self._cut(policy)
        try:
            return self.policy_batches[policy]
        except KeyError:
            raise errors.PolicyNotFoundError(
                f"no policy {policy!r}; {errors.near_names(policy, self.policy_batches)}"
            ) from None

    def __setitem__(self, policy: PolicyID, batch: SampleBatch[ValuesT]) -> None:
        _check_policy(policy, batch)
        self.policy_batches[policy] = batch

    def __iter__(self) -> Iterator[PolicyID]:
        return iter(self.policy_batches)

    def __contains__(self, policy: object) -> bool:
        return policy in self.policy_batches

    def keys(self) -> Set[PolicyID]:
        """Return the policy ids."""
        return self.policy_batches.keys()

    def values(self) -> Iterable[SampleBatch[ValuesT]]:
        """Return the batches of the policies."""
        return self.policy_batches.values()

    def items(self) -> Iterable[tuple[PolicyID, SampleBatch[ValuesT]]]:
        """Return pairs of policy id and batch."""
        return self.policy_batches.items()

    @staticmethod
    def wrap_as_needed(policy_batches: dict[PolicyID, SampleBatch], env_steps: int) -> SampleBatch | MultiAgentBatch:
        """Return the default policy's batch if there is no other policy, otherwise a `MultiAgentBatch`.

        >>> MultiAgentBatch.wrap_as_needed({"default_policy": SampleBatch(a=[1, 2])}, env_steps=2)
        SampleBatch(2 steps: ['a'])
        """
        if len(policy_batches) == 1 and names.DEFAULT_POLICY_ID in policy_batches:
            return policy_batches[names.DEFAULT_POLICY_ID]
        return MultiAgentBatch(policy_batches, env_steps)

    def copy(self) -> MultiAgentBatch[ValuesT]:
        """Copy every policy's batch, arrays included."""
        return self._each(SampleBatch.copy)

    def as_multi_agent(self) -> Self:
        """Return the batch itself."""
        return self

    def size_bytes(self) -> int:
        """Return the size of all columns of all policies in bytes."""
        return sum(map(SampleBatch.size_bytes, self.policy_batches.values()))

    def to_device(
        self,
        device: torch.device | str,
        framework: Literal["torch"] = "torch",
        pin_memory: bool = False,
        use_stream: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> Self:
        """Convert the columns of every policy to tensors on a device, in place; see `SampleBatch.to_device`."""
        for batch in self.policy_batches.values():
            batch.to_device(device, framework, pin_memory, use_stream, stream)
        return self

    def to_torch(
        self,
        dtype: Floats | None = None,
        device: Device = "cpu",
        *,
        floats: Floats | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
    ) -> MultiAgentBatch[torch.Tensor]:
        """Return a batch of tensors, policy by policy; see `SampleBatch.to_torch`.

        >>> batch = MultiAgentBatch({"walker": SampleBatch(rewards=[0.5, 1.0])}, env_steps=2)
        >>> batch.to_torch(floats="float32")["walker"]["rewards"]
        tensor([0.5000, 1.0000])
        """
        how: dict[str, Any] = {"floats": floats, "pin_memory": pin_memory, "non_blocking": non_blocking}
        return self._each(lambda batch: batch.to_torch(dtype, device, **how))

    def to_numpy(self, *, floats: Floats | None = None) -> MultiAgentBatch:
        """Return a batch of arrays, policy by policy; see `SampleBatch.to_numpy`."""
        return self._each(lambda batch: batch.to_numpy(floats=floats))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return a dict of the columns of each policy, by policy id; see `SampleBatch.to_dict`."""
        return {policy: batch.to_dict() for policy, batch in self.items()}

    def _each(self, convert: Callable[[SampleBatch[Any]], SampleBatch[Any]]) -> MultiAgentBatch[Any]:
        return MultiAgentBatch._of({policy: convert(batch) for policy, batch in self.items()}, self.count)

    def compress(self, bulk: bool = False, columns: Set[str] | Iterable[str] = OBSERVATIONS) -> None:
        """Compress columns of every policy, in place; see `SampleBatch.compress`."""
        for batch in self.policy_batches.values():
            batch.compress(bulk, columns)

    def decompress_if_needed(
        self, columns: Set[str] | Iterable[str] = OBSERVATIONS, *, allow_pickle: bool = False
    ) -> Self:
        """Decompress columns of every policy, in place; see `SampleBatch.decompress_if_needed`."""
        for batch in self.policy_batches.values():
            batch.decompress_if_needed(columns, allow_pickle=allow_pickle)
        return self

    # -- parts and order -----------------------------------------------------------------------------------------------

    def _to(self, target: Target) -> Self:
        return self._of({policy: batch._to(target) for policy, batch in self.policy_batches.items()}, self.count)

    def timeslices(self, k: int) -> list[Self]:
        """Split the batch into parts of k consecutive environment steps; a part contains the rows of all agents.

        An environment step is a distinct pair of `eps_id` and `t`. Rows are sorted by `eps_id`, `t` and, if present,
        `agent_index`. A part may contain steps of several episodes; policies without rows are omitted. Parts are views
        if the rows are sorted already, otherwise views of one sorted copy of each policy's batch. Raises
        ColumnNotFoundError if a policy's batch lacks `eps_id` or `t`, ArgumentError if k is not a positive integer.

        Parameters
        ----------
        k
            Environment steps per part; the last part may have fewer.

        Examples
        --------
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
        """View a contiguous slice of environment steps; gather steps of a strided slice."""
        steps = Lockstep(self.policy_batches)
        start, stop, step = key.indices(steps.count)
        if step == 1:
            return self._of(steps.part(start, stop), max(0, stop - start))
        indices = np.arange(start, stop, step)
        return self._of(steps.take(indices), len(indices))

    def select(self, *keys: str) -> Self:
        """View only the named columns of every policy, in the order of `keys`.

        Raises ColumnNotFoundError that lists similar names if a policy lacks one of these columns.

        >>> batch = MultiAgentBatch(
        ...     {"walker": SampleBatch(obs=[1, 2], rewards=[0.5, 1.0])}, env_steps=2
        ... )
        >>> list(batch.select("rewards")["walker"])
        ['rewards']
        """
        return self._of({policy: batch.select(*keys) for policy, batch in self.policy_batches.items()}, self.count)

    def shuffle(self, rng: np.random.Generator | int | None = None) -> Self:
        """Shuffle the rows of each policy independently, in place; see `SampleBatch.shuffle`.

        `rng` is a generator or a seed; by default, the operating system provides the seed. Returns the batch itself.
        Raises SequenceError for unpadded sequences; the batch is then unchanged.
        """
        generator = np.random.default_rng(rng)
        # Policies may share one batch, which is shuffled once.
        batches = {id(batch): batch for batch in self.policy_batches.values()}.values()
        bulk.reorder([move for batch in batches for move in batch._draw_moves(generator)])
        return self

    def split_by_episode(self) -> list[Self]:
        """Split into one part per episode, by `eps_id`, in order of first occurrence.

        The `count` of a part is the number of distinct values of `t`; without `t`, the largest number of rows of any
        policy. Parts are views if the rows of an episode are contiguous. Raises ColumnNotFoundError if a policy's batch
        lacks `eps_id`.

        >>> batch = MultiAgentBatch(
        ...     {
        ...         "walker": SampleBatch(eps_id=[7, 7, 8], t=[0, 1, 0]),
        ...         "guard": SampleBatch(eps_id=[8], t=[1]),
        ...     },
        ...     4,
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
    @suggest_names(minibatch_size="size", batch_size="size")
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
        """Yield minibatches that contain every row once per epoch.

        Parameters
        ----------
        size
            Rows per policy and minibatch; a policy whose rows are exhausted is omitted until the next epoch. In
            lockstep: environment steps per minibatch; the last minibatch of an epoch may have fewer.
        epochs, shuffle, rng, device, floats, prefetch
            As in `SampleBatch.minibatches`.
        lockstep
            Whether a minibatch has the rows of all agents at the minibatch's environment steps, as centralized critics
            require. An environment step is a distinct pair of `eps_id` and `t`; a policy's rows are sorted by step and,
            if present, `agent_index`.

        Raises
        ------
        ArgumentError, DeviceError
            As in `SampleBatch.minibatches`.
        ColumnNotFoundError
            If, in lockstep, a policy's batch lacks `eps_id` or `t`.
        SequenceError
            If `lockstep` and `shuffle` are true and a policy has sequences.

        Examples
        --------
        >>> steps = {"t": [0, 1, 2], "eps_id": [0, 0, 0]}
        >>> batch = MultiAgentBatch(
        ...     {"walker": SampleBatch(steps), "guard": SampleBatch(steps)}, env_steps=3
        ... )
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
        policies = list(self.policy_batches)
        for parts in zip_longest(*(each_part(batch, size, rng) for batch in self.policy_batches.values())):
            present = {policy: part for policy, part in zip(policies, parts, strict=True) if part is not None}
            yield self._of(present, max(part.count for part in present.values()))

    def _epoch_in_lockstep(self, steps: Lockstep, size: int, rng: np.random.Generator | None) -> Iterator[Self]:
        if rng is None:
            for parts, count in steps.parts(size):
                yield self._of(parts, count)
            return
        order = rng.permutation(steps.count)
        for start in range(0, steps.count, size):
            indices = order[start : start + size]
            yield self._of(steps.take(indices), len(indices))

    # -- files and tables ----------------------------------------------------------------------------------------------

    def to_arrow(self) -> pa.Table:
        """Concatenate the policies' tables to an Arrow table that shares memory with the batches.

        A column `policy_id` identifies the policy of each row. Columns of equal type become one column; columns whose
        types differ between policies become one column per policy, named `policy/name`. Rows of policies that lack a
        column are null. `from_arrow` is the inverse.
        """
        return arrow.to_policy_table(
            {policy: (batch._all(), batch._nested, batch._flags) for policy, batch in self.items()}, self.count
        )

    @classmethod
    def from_arrow(cls, table: Any, *, allow_pickle: bool = False, max_nbytes: int | None = None) -> Self:
        """View a table from `to_arrow` as a batch; parameters as in `SampleBatch.from_arrow`.

        Raises FormatError if the table is not a `MultiAgentBatch` or its rows were added or removed,
        UntrustedPickleError if a column is pickled and `allow_pickle` is false, CapacityError if objects exceed
        `max_nbytes`.
        """
        table = arrow.as_table(table)
        bound = arrow.bound_of(table, max_nbytes)
        policies, env_steps = arrow.from_policy_table(table, allow_pickle=allow_pickle, bound=bound)
        batches: dict[str, Any] = {policy: SampleBatch._of(*parts) for policy, parts in policies.items()}
        return cls(batches, env_steps)

    def __arrow_c_schema__(self) -> Any:
        return self.to_arrow().schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def save(self, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True) -> None:
        """Write the batch to a file or folder; see `SampleBatch.save`."""
        from samplebatch.storage import save

        save(self, path, compression, durable=durable)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiAgentBatch):
            return NotImplemented
        return self.count == other.count and self.policy_batches == other.policy_batches

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.count} env steps: {self.policy_batches})"

    def __str__(self) -> str:
        parts = [f"policy {names.for_terminal(repr(policy))}, {batch}" for policy, batch in self.items()]
        return "\n".join([self._title(), *parts])

    def _repr_html_(self) -> str:
        parts = [
            summary.as_html(f"policy {policy!r}: {len(batch)} steps", summary.describe(batch._all()))
            for policy, batch in self.items()
        ]
        return f"<p>{self._title()}</p>" + "".join(parts)

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame of all policies' steps, with a first column `policy_id`; see `SampleBatch.to_pandas`."""
        return summary.stacked_frame({policy: batch.to_pandas() for policy, batch in self.items()}, "policy_id")

    def plot(self, *columns: str) -> Figure:
        """Plot columns of every policy over the policy's own steps, one subplot per column; see `SampleBatch.plot`.

        `columns` are dotted names; a policy without a requested column is skipped. The default is all numeric columns
        except ids, at most twelve in total. Raises MissingExtraError if matplotlib is not installed,
        ColumnNotFoundError if no policy has a requested column, and ColumnTypeError if a requested column is not
        numeric.

        >>> batch = MultiAgentBatch(
        ...     {"walker": SampleBatch(rewards=[0.0, 1.0]), "guard": SampleBatch(rewards=[0.5])}, 2
        ... )
        >>> [axes.get_ylabel() for axes in batch.plot("rewards").axes]
        ['walker/rewards', 'guard/rewards']
        """
        rows = {policy: batch._rowwise() for policy, batch in self.items()}
        all_names = dict.fromkeys(name for flat in rows.values() for name in flat)
        for name in columns:
            if name not in all_names:
                raise errors.no_such_column(name, all_names)
        parts = [
            summary.Part(
                f"{policy}/",
                {name: flat[name] for name in columns or flat if name in flat},
                ends_in(flat),
            )
            for policy, flat in rows.items()
        ]
        return summary.draw_columns(parts, chosen=bool(columns))

    def _title(self) -> str:
        return f"MultiAgentBatch({self.count} env steps, {self.agent_steps()} agent steps)"


def _check_policy(policy: PolicyID, batch: SampleBatch[Any]) -> None:
    if not names.is_policy_id(policy):
        raise errors.ColumnTypeError(f"a policy id must be a string or an integer, got a {type(policy).__name__}")
    if not isinstance(batch, SampleBatch):
        raise errors.ColumnTypeError(f"policy {policy!r} must have a SampleBatch, got a {type(batch).__name__}")


def _split(batch: SampleBatch[Any]) -> Iterator[tuple[Any, SampleBatch[Any]]]:
    """Yield the id and rows of each episode, in order of first occurrence."""
    batch = unpadded(batch)
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
    if not all(names.T in part for part in parts.values()):
        return max(part.count for part in parts.values())
    t = np.concatenate([np.asarray(part[names.T]) for part in parts.values()])
    return len(number_env_steps(np.zeros_like(t), t).episode)


class Lockstep:
    """Rows of several policies, indexed by environment step.

    policy_batches: batch of each policy, with columns `eps_id` and `t`.

    Raises ColumnNotFoundError if a batch lacks `eps_id` or `t`.
    """

    __slots__ = ("_batches", "_starts", "_steps", "count")

    def __init__(self, policy_batches: Mapping[PolicyID, SampleBatch[Any]]) -> None:
        self._batches = {policy: _order(batch) for policy, batch in policy_batches.items() if batch.count}
        self._steps: dict[PolicyID, Indices] = {}
        self._starts: dict[PolicyID, Indices] = {}
        self.count = 0
        if not self._batches:
            return
        eps_id, t = (
            np.concatenate([np.asarray(batch[name]) for batch in self._batches.values()])
            for name in (names.EPS_ID, names.T)
        )
        steps, episode = number_env_steps(eps_id, t)
        self.count = len(episode)
        offset = 0
        for policy, batch in self._batches.items():
            self._steps[policy] = steps[offset : offset + batch.count]
            offset += batch.count

    def parts(self, k: int) -> Iterator[tuple[dict[PolicyID, SampleBatch[Any]], int]]:
        """Yield each policy's rows for every k consecutive environment steps, and the number of these steps."""
        starts = np.arange(0, self.count, k)
        policies = [
            (
                policy,
                batch.slice if batch._has_sequences else batch._view,
                [*self._steps[policy].searchsorted(starts).tolist(), batch.count],
            )
            for policy, batch in self._batches.items()
        ]
        for i, start in enumerate(starts.tolist()):
            parts = {}
            for policy, part, bounds in policies:
                if bounds[i] < bounds[i + 1]:
                    parts[policy] = part(bounds[i], bounds[i + 1])
            yield parts, min(k, self.count - start)

    def part(self, start: int, stop: int) -> dict[PolicyID, SampleBatch[Any]]:
        """View each policy's rows for the environment steps `start` to `stop`."""
        parts = {}
        for policy, batch in self._batches.items():
            first, last = self._steps[policy].searchsorted((start, stop)).tolist()
            if first < last:
                parts[policy] = batch.slice(first, last)
        return parts

    def take(self, steps: Indices) -> dict[PolicyID, SampleBatch[Any]]:
        """Gather each policy's rows for the given environment steps.

        Raises SequenceError if a policy has sequences, because the gather would split sequences.
        """
        parts = {}
        for policy, batch in self._batches.items():
            if batch._has_sequences:
                raise errors.SequenceError(
                    f"rows of policy {policy!r} must be single steps to be gathered by environment step, got sequences"
                )
            starts = self._starts.get(policy)
            if starts is None:
                starts = self._starts[policy] = self._steps[policy].searchsorted(np.arange(self.count + 1))
            rows = steps_of(np.diff(starts), steps, starts[:-1])
            if len(rows):
                parts[policy] = batch._gather(rows)
        return parts


def _order(batch: SampleBatch[Any]) -> SampleBatch[Any]:
    """Return the batch sorted by episode, time and agent; a sorted batch is not copied."""
    batch = unpadded(batch)
    keys = [
        np.asarray(batch[name])
        for name in (names.AGENT_INDEX, names.T, names.EPS_ID)
        if name != names.AGENT_INDEX or name in batch
    ]
    order = np.lexsort(keys)
    if (order[1:] > order[:-1]).all():
        return batch
    return batch._gather(order)
