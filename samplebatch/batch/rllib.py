"""Functions that clients of RLlib call beside the methods of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplebatch import names
from samplebatch.batch.concat import SampleBatchType
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch, require_flat
from samplebatch.batch.sequences import as_lengths, lengths_of
from samplebatch.batch.tree import flatten, is_nested
from samplebatch.column.convert import as_column
from samplebatch.errors import PolicyNotFoundError, near_names


def attempt_count_timesteps(tensor_dict: Mapping[str, Any]) -> int:
    """Count the steps of columns by name: the sum of `seq_lens`, else the rows of the first column that has any.

    `infos`, `state_in_*` and `state_out_*` do not count. 0 where nothing counts.

    Examples
    --------
    >>> attempt_count_timesteps({"infos": [{}], "obs": {"x": [1.0, 2.0]}}), attempt_count_timesteps({"infos": [{}]})
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
    """Return the default policy's batch of a `MultiAgentBatch` that has no other, and a flat batch itself.

    Raises
    ------
    PolicyNotFoundError
        If there are other policies, or none.

    Examples
    --------
    >>> convert_ma_batch_to_sample_batch(SampleBatch(a=[1, 2]).as_multi_agent())
    SampleBatch(2 steps: ['a'])
    """
    if not isinstance(batch, MultiAgentBatch):
        return require_flat(batch)
    if list(batch) != [names.DEFAULT_POLICY_ID]:
        raise PolicyNotFoundError(
            f"a batch of the policy {names.DEFAULT_POLICY_ID!r} alone can be made flat; {near_names('', batch)}"
        )
    return batch[names.DEFAULT_POLICY_ID]
