"""RLlib's functions on batches, such as `concat_samples`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from samplebatch import names
from samplebatch.arguments import choice, suggest_names
from samplebatch.batch import joining
from samplebatch.batch.joining import Missing
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch, require_flat
from samplebatch.batch.sequences import as_lengths, lengths_of
from samplebatch.batch.tree import flatten, is_nested
from samplebatch.column.convert import as_column
from samplebatch.errors import PolicyNotFoundError, near_names
from samplebatch.names import PolicyID

SampleBatchType = SampleBatch | MultiAgentBatch


@suggest_names()
def concat_samples(samples: Iterable[SampleBatchType], *, missing: Missing = "error") -> SampleBatchType:
    """Concatenate batches into a new batch, with one copy.

    Empty batches are ignored, except that a column that is ragged in an empty batch is ragged in the result. If all
    batches are empty, the result has no columns, unless one of the batches has a ragged column. The result then has
    the columns of the first batch that has columns. The result is a `SampleBatch` if all inputs are flat, otherwise a
    `MultiAgentBatch` in which flat batches belong to the default policy. RLlib's batches are accepted as well.

    Columns must have equal row shapes in all batches. Dtypes may differ if one dtype represents the values of all
    dtypes exactly. `num_grad_updates` is averaged over the steps of the batches that specify a value.

    Parameters
    ----------
    samples
        The batches.
    missing
        Handling of columns that only some batches have: `"error"` raises an error, `"drop"` removes the columns,
        `"zero"` fills missing rows with zeros (None for objects).

    Raises
    ------
    ColumnMismatchError
        If a column is missing and `missing` is `"error"`, or row shapes or dtypes are incompatible.
    SequenceError
        If only some batches have sequences, or `zero_padded`, `time_major` or, if padded, `max_seq_len` differ.
    ColumnTypeError
        If an item is neither a SampleBatch nor a MultiAgentBatch.
    ArgumentError
        If `missing` is not `"error"`, `"drop"` or `"zero"`.

    Examples
    --------
    >>> concat_samples([SampleBatch(a=[1, 2]), SampleBatch(), SampleBatch(a=[3])])["a"].tolist()
    [1, 2, 3]
    >>> batches = [SampleBatch(a=[1], b=[2]), SampleBatch(a=[3])]
    >>> concat_samples(batches, missing="zero")["b"].tolist()
    [2, 0]
    """
    samples = list(samples)
    flat = [sample for sample in samples if type(sample) is SampleBatch]
    if len(flat) == len(samples):
        return join(flat, missing)
    if any(hasattr(sample, "policy_batches") for sample in samples):
        return concat_samples_into_ma_batch(samples, missing=missing)
    return join([require_flat(sample) for sample in samples], missing)


def concat_samples_into_ma_batch(samples: Iterable[SampleBatchType], *, missing: Missing = "error") -> MultiAgentBatch:
    """Concatenate batches into a `MultiAgentBatch`; raises the same errors as `concat_samples`.

    Examples
    --------
    >>> joined = concat_samples_into_ma_batch(
    ...     [SampleBatch(a=[1, 2]), MultiAgentBatch({"p": SampleBatch(a=[3])}, 1)]
    ... )
    >>> list(joined.policy_batches), joined.count
    (['default_policy', 'p'], 3)
    """
    by_policy: dict[PolicyID, list[SampleBatch]] = {}
    env_steps = 0
    for sample in samples:
        if hasattr(sample, "policy_batches"):
            parts = {policy: require_flat(part) for policy, part in sample.policy_batches.items()}
        elif len(require_flat(sample)):
            parts = {names.DEFAULT_POLICY_ID: require_flat(sample)}
        else:
            continue
        for policy, part in parts.items():
            by_policy.setdefault(policy, []).append(part)
        env_steps += sample.env_steps()
    return MultiAgentBatch({policy: join(parts, missing) for policy, parts in by_policy.items()}, env_steps)


def join(samples: Sequence[SampleBatch], missing: Missing = "error") -> SampleBatch:
    """Concatenate flat batches; see `concat_samples`."""
    if missing != "error":
        choice("missing", missing, get_args(Missing))
    return joining.join(samples, SampleBatch, missing)


def attempt_count_timesteps(tensor_dict: Mapping[str, Any]) -> int:
    """Count the steps of columns: the sum of `seq_lens`, otherwise the rows of the first non-empty column.

    `infos`, `state_in_*` and `state_out_*` are ignored. Returns 0 if all columns are ignored.

    Examples
    --------
    >>> (
    ...     attempt_count_timesteps({"infos": [{}], "obs": {"x": [1.0, 2.0]}}),
    ...     attempt_count_timesteps({"infos": [{}]}),
    ... )
    (2, 0)
    >>> attempt_count_timesteps({"obs": [1.0, 0.0, 2.0, 3.0], "seq_lens": [1, 2]})
    3
    """
    lengths = as_lengths(tensor_dict.get(names.SEQ_LENS))
    if lengths is not None:
        return int(lengths_of(as_column(lengths, names.SEQ_LENS)).sum())
    for name, value in tensor_dict.items():
        if name == names.SEQ_LENS or not names.counts_steps(name):
            continue
        first: Any = next((leaf for _, leaf in flatten(name, value)[1]), None) if is_nested(value) else value
        single = getattr(first, "ndim", 1) == 0 or isinstance(first, str | bytes)
        if hasattr(first, "__len__") and not single and len(first):
            return len(first)
    return 0


def convert_ma_batch_to_sample_batch(batch: SampleBatchType) -> SampleBatch:
    """Return the default policy's batch if there is no other policy; a flat batch is returned unchanged.

    Raises
    ------
    PolicyNotFoundError
        If the batch contains another policy, or no policy.

    Examples
    --------
    >>> convert_ma_batch_to_sample_batch(SampleBatch(a=[1, 2]).as_multi_agent())
    SampleBatch(2 steps: ['a'])
    """
    if not isinstance(batch, MultiAgentBatch):
        return require_flat(batch)
    if list(batch) != [names.DEFAULT_POLICY_ID]:
        raise PolicyNotFoundError(
            f"only a batch with the single policy {names.DEFAULT_POLICY_ID!r} can be flattened; {near_names('', batch)}"
        )
    return batch[names.DEFAULT_POLICY_ID]
