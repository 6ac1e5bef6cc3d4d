"""SampleBatch: steps of experience, RLlib's flat type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, overload

import numpy as np

from samplebatch import names
from samplebatch.batch import arrow, frame
from samplebatch.batch.device_batch import ValuesT
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.joining import join
from samplebatch.batch.sequences import as_lengths
from samplebatch.batch.shown_batch import ShownBatch
from samplebatch.batch.tree import Structure, columns_in
from samplebatch.batch.view_requirement import view_step
from samplebatch.column.convert import plain_columns
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RowIndexError

if TYPE_CHECKING:
    import pyarrow as pa

    from samplebatch.batch.multi_agent import MultiAgentBatch
    from samplebatch.batch.nested.batch import Batch


class SampleBatch(ShownBatch, Generic[ValuesT]):
    """Steps of experience: a mapping from column name to array, all of one length.

    Columns keep the very arrays they are given wherever these are C-contiguous and in native byte order, and copy
    others once. Slices are views that cut a column when it is asked for. A dict or tuple of arrays is a nested column:
    stored flat under dotted names, handed out as it was, in a fresh dict or tuple each time. `len` counts steps, not
    columns.

    With a column `seq_lens` of shape (s,) the steps form s sequences for recurrent models. Then `state_in_*` columns
    have one row per sequence, all others one row per step; when padded, all others have `max_seq_len` rows per
    sequence.

    `batch["dones"]` is `terminateds` or `truncateds` where the batch has no such column.

    Parameters
    ----------
    *args, **kwargs
        Columns by name: a mapping, a dataclass, a named tuple, a TensorDict, another library's batch, or pairs; and
        keywords.
    _time_major, _zero_padded, _max_seq_len, _num_grad_updates, _is_training
        The flags (see `Flags`). `_max_seq_len` defaults to the longest sequence.

    Raises
    ------
    ColumnLengthError
        If a column has another number of rows than the batch; names both.
    ColumnTypeError
        If a value has no rows, or a dtype that no column can hold.
    SequenceError
        If the sequences do not fit the padding.

    Examples
    --------
    >>> batch = SampleBatch(obs=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], rewards=[1.0, 0.0, 1.0])
    >>> len(batch), batch["rewards"].mean().round(2).item()
    (3, 0.67)
    >>> batch[1:]["obs"].tolist()
    [[3.0, 4.0], [5.0, 6.0]]
    >>> batch[batch["rewards"] > 0]["obs"].tolist()
    [[1.0, 2.0], [5.0, 6.0]]
    """

    OBS = names.OBS
    CUR_OBS = names.OBS
    NEXT_OBS = names.NEXT_OBS
    ACTIONS = names.ACTIONS
    REWARDS = names.REWARDS
    TERMINATEDS = names.TERMINATEDS
    TRUNCATEDS = names.TRUNCATEDS
    DONES = names.DONES
    INFOS = names.INFOS
    EPS_ID = names.EPS_ID
    ENV_ID = names.ENV_ID
    AGENT_INDEX = names.AGENT_INDEX
    UNROLL_ID = names.UNROLL_ID
    T = names.T
    SEQ_LENS = names.SEQ_LENS
    PREV_ACTIONS = names.PREV_ACTIONS
    PREV_REWARDS = names.PREV_REWARDS
    ACTION_DIST = names.ACTION_DIST
    ACTION_DIST_INPUTS = names.ACTION_DIST_INPUTS
    ACTION_PROB = names.ACTION_PROB
    ACTION_LOGP = names.ACTION_LOGP
    VF_PREDS = names.VF_PREDS
    VALUES_BOOTSTRAPPED = names.VALUES_BOOTSTRAPPED
    RETURNS_TO_GO = names.RETURNS_TO_GO
    ATTENTION_MASKS = names.ATTENTION_MASKS
    OBS_EMBEDS = names.OBS_EMBEDS

    def __init__(
        self,
        *args: Any,
        _time_major: bool | None = None,
        _zero_padded: bool = False,
        _max_seq_len: int | None = None,
        _num_grad_updates: float | None = None,
        _is_training: bool = False,
        **kwargs: Any,
    ) -> None:
        if (
            _time_major is not None
            or _zero_padded
            or _max_seq_len is not None
            or _num_grad_updates is not None
            or _is_training
        ):
            self._flags = Flags(_time_major, _zero_padded, _max_seq_len, _num_grad_updates, bool(_is_training))
        data = columns_in(args, kwargs)
        if names.SEQ_LENS in data:
            lengths = data[names.SEQ_LENS] = as_lengths(data[names.SEQ_LENS])
            if lengths is None:
                del data[names.SEQ_LENS]
        plain = plain_columns(data)
        self._columns = self._build_all(data) if plain is None else plain
        self._count_rows()

    def _build_all(self, data: Mapping[str, Any]) -> dict[str, Column]:
        """Build the columns of all values one after the other, and adopt their structures."""
        self._columns = columns = {}
        for name, values in data.items():
            structure, built = self._build(name, values)
            if name in columns:
                raise ColumnMismatchError(
                    f"column {name!r} is there already, as part of a nested column; give it another name"
                )
            if structure is not None:
                self._nested = {**self._nested, name: structure}
            columns.update(built)
        return columns

    if TYPE_CHECKING:
        # At run time the method is that of the mapping: an override would cost a call for every column.
        @overload
        def __getitem__(self, key: str) -> ValuesT: ...
        @overload
        def __getitem__(self, key: Any) -> Self: ...
        def __getitem__(self, key: Any) -> Any: ...

    # -- copies and parts ---------------------------------------------------------------------------------------------

    def concat(self, other: SampleBatch[ValuesT]) -> SampleBatch[ValuesT]:
        """Join another batch to this one in a new batch; see `concat_samples`.

        Examples
        --------
        >>> SampleBatch(a=[1, 2]).concat(SampleBatch(a=[3, 4, 5]))["a"].tolist()
        [1, 2, 3, 4, 5]
        """
        parts: list[SampleBatch[Any]] = [self, require_flat(other)]
        return join(parts, SampleBatch)

    def as_multi_agent(self, module_id: str | None = None) -> MultiAgentBatch[ValuesT]:
        """Wrap the batch as that of one policy, by default the default one, with as many env steps as it has steps."""
        if module_id is None:
            return _multi_agent_batch()._of({names.DEFAULT_POLICY_ID: self}, self.count)
        return _multi_agent_batch()({module_id: self}, self.count)

    def as_batch(self, names: names.Words = "kept") -> Batch:
        """Return a nested batch over the same arrays and tensors; nested columns become nested batches.

        A tuple of columns becomes a batch with the names `0`, `1`, ...; ragged rows become an array of objects, a view
        of each row. Writing to one of the two is seen in the other;
        columns added to one are not.

        Parameters
        ----------
        names
            `"tianshou"` renames the columns that both libraries know: `rewards` becomes `rew`, `new_obs` becomes
            `obs_next`. `"rllib"` does the reverse, `"kept"` keeps all names.

        Raises
        ------
        ColumnTypeError
            If a column is compressed; names it.
        ArgumentError
            If `names` is another word.
        ColumnMismatchError
            If two columns would have one name.

        Examples
        --------
        >>> SampleBatch(obs={"x": [1.0, 2.0]}, rewards=[0.5, 1.0]).as_batch(names="tianshou")
        Batch(
            obs: Batch(
                     x: array([1., 2.]),
                 ),
            rew: array([0.5, 1. ]),
        )
        """
        from samplebatch.batch.nested import as_batch

        return as_batch(self, names)

    # -- other forms --------------------------------------------------------------------------------------------------

    def get_single_step_input_dict(
        self, view_requirements: Mapping[str, Any], index: int | Literal["last"] = "last"
    ) -> SampleBatch:
        """Gather a model's inputs at one step into a batch of that step.

        Parameters
        ----------
        view_requirements
            The model's views by name, a `ViewRequirement` or RLlib's own each; those not used for computing actions
            are left out.
        index
            The step, negative ones from the end; or `"last"` for the step *after* the last, as for estimating its
            value: there `obs` is the last row of `new_obs`, `prev_actions` that of `actions`, `prev_rewards` that of
            `rewards`.

        Returns
        -------
        SampleBatch
            Columns of shape (1, ...), or (1, window, ...) for windows, with `seq_lens` [1]. Steps before the first are
            zeros.

        Raises
        ------
        ColumnNotFoundError
            If a view looks at a column that is not there.
        RowIndexError
            If the step lies outside.

        Examples
        --------
        >>> from samplebatch import ViewRequirement
        >>> batch = SampleBatch(obs=[1, 2, 3], new_obs=[2, 3, 4])
        >>> wanted = {"obs": ViewRequirement(), "stack": ViewRequirement("obs", shift="-2:0")}
        >>> batch.get_single_step_input_dict(wanted)["stack"]
        array([[2, 3, 4]])
        """
        if index != "last" and not -self.count <= index < self.count:
            raise RowIndexError(f"step {index} is outside the batch, which has {self.count}")
        step = None if index == "last" else index % self.count
        views = view_step(self, view_requirements, step)
        return SampleBatch({**views, names.SEQ_LENS: np.ones(1, np.int32)}, _is_training=self.is_training)

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table over the same memory.

        Without sequences it has a row per step. With them it has a row per sequence, whose step columns are lists:
        their values are the columns untouched. N-dimensional columns are fixed-shape tensors. `from_arrow` is the
        inverse.

        Examples
        --------
        >>> SampleBatch(obs=np.zeros((2, 3)), rewards=[1.0, 2.0]).to_arrow().num_rows
        2
        """
        return arrow.to_table(self._all(), self._nested, self._flags)

    @classmethod
    def from_arrow(cls, table: Any, *, allow_pickle: bool = False, max_nbytes: int | None = None) -> Self:
        """View an Arrow table as a batch, without copying wherever its layout permits.

        Parameters
        ----------
        table
            A table, record batch or anything with the Arrow PyCapsule interface; written by `to_arrow` or by anyone
            else. Columns in several chunks are joined, with one copy.
        allow_pickle
            Whether columns of Python objects that Arrow could not hold may be unpickled. Only for data that you trust.
        max_nbytes
            Bytes that Python objects may take; 256 MiB or 1024 times the table's own, whichever is more, if None.

        Raises
        ------
        ColumnTypeError
            If a column has nulls or a type that no column can hold; names it.
        UntrustedPickleError
            If a column is pickled and `allow_pickle` is false; names it.
        CapacityError
            If objects take more than `max_nbytes`; names the column.

        Examples
        --------
        >>> import pyarrow as pa
        >>> SampleBatch.from_arrow(pa.table({"rewards": [1.0, 2.0]}))["rewards"]
        array([1., 2.])
        """
        table = arrow.as_table(table)
        bound = arrow.bound_of(table, max_nbytes)
        return cls._of(*arrow.from_table(table, allow_pickle=allow_pickle, bound=bound))

    def __arrow_c_schema__(self) -> Any:
        return self.to_arrow().schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        header, buffers = frame.dump_columns(self._all())
        wrapped = frame.for_pickle(buffers, int(protocol))
        flags = None if self._flags is DEFAULT else astuple(self._flags)
        return _unpickled, (type(self), header, dict(self._nested), flags, *wrapped)


def _unpickled(
    cls: type[SampleBatch], header: Any, nested: dict[str, Structure], flags: tuple[Any, ...] | None, *buffers: Any
) -> SampleBatch:
    """Rebuild a pickled batch; unpickling means trusting its bytes."""
    columns = frame.load_columns(header, buffers, allow_pickle=True)
    return cls._of(columns, nested, DEFAULT if flags is None else Flags(*flags))


@cache
def _multi_agent_batch() -> type[MultiAgentBatch[Any]]:
    """Import the class that is made of this one, once."""
    from samplebatch.batch import MultiAgentBatch

    return MultiAgentBatch


_RLLIB_FLAGS = ("time_major", "zero_padded", "max_seq_len", "num_grad_updates", "is_training")


def require_flat(sample: Any) -> SampleBatch[Any]:
    """Return a `SampleBatch`, make one of RLlib's over the same arrays, and refuse anything else."""
    if isinstance(sample, SampleBatch):
        return sample
    if isinstance(sample, Mapping) and all(hasattr(sample, name) for name in _RLLIB_FLAGS):
        return SampleBatch(dict(sample), **{f"_{name}": getattr(sample, name) for name in _RLLIB_FLAGS})
    raise ColumnTypeError(f"only SampleBatch and MultiAgentBatch can be joined, got {type(sample).__name__}")
