"""Joining batches: `concat_samples` and `concat_samples_into_ma_batch`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from samplebatch import names
from samplebatch.batch import joining
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch, require_flat
from samplebatch.names import PolicyID

SampleBatchType = SampleBatch | MultiAgentBatch


def concat_samples(samples: Iterable[SampleBatchType]) -> SampleBatchType:
    """Join batches into a new one, one copy of every byte.

    Empty batches are ignored. The result is a `SampleBatch` if all of them are; one `MultiAgentBatch` among them makes
    it one, in which flat batches belong to the default policy.

    Columns must have the same names in all batches, in any order, and the same row shapes; dtypes may differ where
    one of them holds all the others without loss. `num_grad_updates` is averaged by steps over the batches that know
    theirs.

    Raises
    ------
    ColumnMismatchError
        If a column is missing from some of them, or has row shapes or dtypes that cannot be joined; names it.
    SequenceError
        If some have sequences and some not, or `zero_padded`, `time_major` or, when padded, `max_seq_len` differ.
    ColumnTypeError
        If one is neither type of batch.

    Examples
    --------
    >>> concat_samples([SampleBatch(a=[1, 2]), SampleBatch(), SampleBatch(a=[3])])["a"].tolist()
    [1, 2, 3]
    """
    samples = list(samples)
    flat = [sample for sample in samples if type(sample) is SampleBatch]
    if len(flat) == len(samples):
        return join(flat)
    if any(isinstance(sample, MultiAgentBatch) for sample in samples):
        return concat_samples_into_ma_batch(samples)
    return join([require_flat(sample) for sample in samples])


def concat_samples_into_ma_batch(samples: Iterable[SampleBatchType]) -> MultiAgentBatch:
    """Join batches like `concat_samples`, into a `MultiAgentBatch` in any case.

    Examples
    --------
    >>> joined = concat_samples_into_ma_batch([SampleBatch(a=[1, 2]), MultiAgentBatch({"p": SampleBatch(a=[3])}, 1)])
    >>> list(joined.policy_batches), joined.count
    (['default_policy', 'p'], 3)
    """
    by_policy: dict[PolicyID, list[SampleBatch]] = {}
    env_steps = 0
    for sample in samples:
        if isinstance(sample, MultiAgentBatch):
            parts = sample.policy_batches
        elif len(require_flat(sample)):
            parts = {names.DEFAULT_POLICY_ID: sample}
        else:
            continue
        for policy, part in parts.items():
            by_policy.setdefault(policy, []).append(part)
        env_steps += sample.env_steps()
    return MultiAgentBatch({policy: join(parts) for policy, parts in by_policy.items()}, env_steps)


def join(samples: Sequence[SampleBatch]) -> SampleBatch:
    """Join flat batches; see `concat_samples`."""
    return joining.join(samples, SampleBatch)
