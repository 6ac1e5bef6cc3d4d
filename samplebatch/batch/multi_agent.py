"""MultiAgentBatch: one SampleBatch per policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, overload

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch import arrow, summary
from samplebatch.batch.column_map import OBSERVATIONS
from samplebatch.batch.data_frame import stacked_frame
from samplebatch.batch.device_batch import ValuesT
from samplebatch.batch.plot import Part, draw_columns
from samplebatch.batch.policy_rows import PolicyRows
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.saved import Saved
from samplebatch.errors import ColumnTypeError, PolicyNotFoundError, near_names, no_such_column
from samplebatch.names import PolicyID

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch
    from matplotlib.figure import Figure

    from samplebatch.batch.delivery import Device
    from samplebatch.batch.targets import Floats


class MultiAgentBatch(PolicyRows, Saved, Generic[ValuesT]):
    """Steps of several agents, one `SampleBatch` per policy that acted for them.

    `batch["walker"]` is a policy's batch, and can be assigned; `batch[2:5]` views environment steps, with the rows of
    all agents at them.

    Parameters
    ----------
    policy_batches
        Batch of each policy, by policy id: strings or integers, kept as they are. So is the dict.
    env_steps
        Steps of the environment that the batch stands for; there is at least one agent step per environment step.

    Attributes
    ----------
    policy_batches
        Batch of each policy, by policy id.
    count
        Steps of the environment.

    Raises
    ------
    ColumnTypeError
        If a policy id is neither a string nor an integer, or its batch is not a `SampleBatch`.
    ArgumentError
        If `env_steps` is no whole number from 0 on.

    Examples
    --------
    >>> batch = MultiAgentBatch({"walker": SampleBatch(obs=[1, 2]), "guard": SampleBatch(obs=[3])}, env_steps=2)
    >>> batch["walker"]["obs"].tolist(), batch.env_steps(), batch.agent_steps()
    ([1, 2], 2, 3)
    """

    policy_batches: dict[PolicyID, SampleBatch[ValuesT]]

    def __init__(self, policy_batches: dict[PolicyID, SampleBatch[ValuesT]], env_steps: int) -> None:
        for policy, batch in policy_batches.items():
            _check_policy(policy, batch)
        self.policy_batches = policy_batches
        self.count = whole("env_steps", env_steps)

    def env_steps(self) -> int:
        """Return the number of steps of the environment."""
        return self.count

    def __len__(self) -> int:
        return self.count

    def agent_steps(self) -> int:
        """Return the number of steps of all agents together."""
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
            raise PolicyNotFoundError(f"no policy {policy!r}; {near_names(policy, self.policy_batches)}") from None

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
        """Return the pairs of policy id and batch."""
        return self.policy_batches.items()

    @staticmethod
    def wrap_as_needed(policy_batches: dict[PolicyID, SampleBatch], env_steps: int) -> SampleBatch | MultiAgentBatch:
        """Return the default policy's batch itself if there is no other, else a `MultiAgentBatch` of all of them.

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
        """Return this very batch."""
        return self

    def size_bytes(self) -> int:
        """Return the bytes of all columns of all policies."""
        return sum([batch.size_bytes() for batch in self.policy_batches.values()])

    def to_device(
        self,
        device: torch.device | str,
        framework: Literal["torch"] = "torch",
        pin_memory: bool = False,
        use_stream: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> Self:
        """Turn the columns of every policy into tensors on a device, in place; see `SampleBatch.to_device`."""
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

        Examples
        --------
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
        """Convert every policy's batch."""
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

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table over the same memory: the policies' tables one under the other.

        A column `policy_id` tells whose row it is. A column that all policies have alike is one column of the table.
        One that differs in type is a column of its own for each policy, named `policy/name`. Rows of policies that lack
        a column are null. `from_arrow` is the inverse.
        """
        return arrow.to_policy_table(
            {policy: (batch._all(), batch._nested, batch._flags) for policy, batch in self.items()}, self.count
        )

    @classmethod
    def from_arrow(cls, table: Any, *, allow_pickle: bool = False, max_nbytes: int | None = None) -> Self:
        """View a table that `to_arrow` made as a batch; parameters as of `SampleBatch.from_arrow`.

        Raises
        ------
        FormatError
            If the table is no `MultiAgentBatch`, or rows were added or taken out.
        UntrustedPickleError
            If a column is pickled and `allow_pickle` is false; names it.
        CapacityError
            If objects take more than `max_nbytes`; names the column.
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiAgentBatch):
            return NotImplemented
        return self.count == other.count and self.policy_batches == other.policy_batches

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.count} env steps: {self.policy_batches})"

    def __str__(self) -> str:
        parts = [f"policy {policy!r}, {batch}" for policy, batch in self.items()]
        return "\n".join([self._title(), *parts])

    def _repr_html_(self) -> str:
        parts = [
            summary.as_html(f"policy {policy!r}: {len(batch)} steps", summary.describe(batch._all()))
            for policy, batch in self.items()
        ]
        return f"<p>{self._title()}</p>" + "".join(parts)

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame of all policies' steps, with a first column `policy_id`; see `SampleBatch.to_pandas`."""
        return stacked_frame({policy: batch.to_pandas() for policy, batch in self.items()}, "policy_id")

    def plot(self, *columns: str) -> Figure:
        """Draw columns of every policy over its own steps, an axis each; see `SampleBatch.plot`.

        Parameters
        ----------
        *columns
            The columns, by dotted name, of the policies that have them; by default all of numbers, ids aside, but no
            more than twelve in all.

        Raises
        ------
        MissingExtraError
            If matplotlib is not installed.
        ColumnNotFoundError
            If no policy has a column; lists the near names.
        ColumnTypeError
            If one is not of numbers; names it.

        Examples
        --------
        >>> batch = MultiAgentBatch({"walker": SampleBatch(rewards=[0.0, 1.0]), "guard": SampleBatch(rewards=[0.5])}, 2)
        >>> [axes.get_ylabel() for axes in batch.plot("rewards").axes]
        ['walker/rewards', 'guard/rewards']
        """
        rows = {policy: batch._rowwise() for policy, batch in self.items()}
        known = dict.fromkeys(name for own in rows.values() for name in own)
        for name in columns:
            if name not in known:
                raise no_such_column(name, known)
        parts = [
            Part(f"{policy}/", {name: own[name] for name in columns or own if name in own}, self[policy]._ends())
            for policy, own in rows.items()
        ]
        return draw_columns(parts, chosen=bool(columns))

    def _title(self) -> str:
        return f"MultiAgentBatch({self.count} env steps, {self.agent_steps()} agent steps)"


def _check_policy(policy: PolicyID, batch: SampleBatch[Any]) -> None:
    if not names.is_policy_id(policy):
        raise ColumnTypeError(f"a policy id must be a string or an integer, got a {type(policy).__name__}")
    if not isinstance(batch, SampleBatch):
        raise ColumnTypeError(f"policy {policy!r} must have a SampleBatch, got a {type(batch).__name__}")
