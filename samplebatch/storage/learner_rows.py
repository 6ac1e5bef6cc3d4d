"""Rows of datasets, and of samplers of several sources, as learners take them: with targets, as buffers have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.batch.delivery import Delivery
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.nested.tensors import tree_to
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ArgumentError, ColumnNotFoundError
from samplebatch.names import DISCOUNT, RETURNS
from samplebatch.storage.dataset import Dataset

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device
    from samplebatch.batch.targets import Floats

_FOR_TARGETS = ("rew", "terminated", "obs_next")
"""The columns of a step that targets are made of."""


def sample_steps(
    source: Any, sample_size: int | None, *, n_step: int | None, gamma: float, device: Device, floats: Floats
) -> tuple[Batch, Any]:
    """Draw rows of a source that is no replay buffer, as `ReplayBuffer.sample` would return them.

    Rows stand for single steps; those that have `returns` and `discount` already, as `NStepReturns` adds them where
    steps are collected, for as many as these.

    Parameters
    ----------
    source
        A `Dataset`, a `MixedSampler`, or another with such a `sample`.
    sample_size
        How many; 0 or None for all rows of a dataset, in order.
    n_step, gamma, device, floats
        As `ReplayBuffer.sample` takes them.

    Raises
    ------
    ArgumentError
        If single steps are to stand for several.
    ColumnNotFoundError
        If rows lack a column that targets need; names it.
    SampleBatchError
        As the source's `sample` does.

    Examples
    --------
    >>> import tempfile
    >>> dataset = Dataset(tempfile.mkdtemp() + "/steps")
    >>> steps = SampleBatch(obs=[0.0, 1.0], new_obs=[1.0, 2.0], rewards=[0.5, 1.0], terminateds=[False, True])
    >>> path = dataset.append(steps)
    >>> rows, _ = sample_steps(dataset, 0, n_step=1, gamma=0.9, device="cpu", floats="float32")
    >>> rows.returns, rows.discount
    (tensor([0.5000, 1.0000]), tensor([0.9000, 0.0000]))
    """
    if sample_size or not isinstance(source, Dataset):
        drawn, indices = source.sample(sample_size)
    else:
        indices = np.arange(len(source))
        drawn = source.take(indices)
    rows: Batch = drawn.as_batch("tianshou") if isinstance(drawn, SampleBatch) else Batch(drawn)
    if n_step is not None:
        rows = node(Batch, rows.__dict__ | _windows(rows.__dict__, n_step, gamma))
    return Delivery(device, floats).one(rows, tree_to), indices


def _windows(held: dict[str, Any], n_step: int, gamma: float) -> dict[str, Any]:
    """Return the sums of rewards and the factors of estimates of rows."""
    for name in _FOR_TARGETS:
        if name not in held:
            raise ColumnNotFoundError(
                f"rows must have column {name!r} to make targets of, there are {', '.join(map(repr, held))}; "
                "a buffer's add_from knows next observations by the steps that follow"
            )
    if RETURNS in held and DISCOUNT in held:
        return {}
    if n_step > 1:
        raise ArgumentError(
            f"n_step_return_horizon must be 1 for rows that are single steps, got {n_step}; fill a buffer by add_from"
        )
    return {RETURNS: held["rew"], DISCOUNT: gamma * ~np.asarray(held["terminated"], bool)}
