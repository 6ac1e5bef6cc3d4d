"""MixedSampler: weighted sampling of batches from several datasets and replay buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
from samplebatch.arguments import choice, whole
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.batch.delivery import Delivery, as_array, tree_to
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, node, with_unit_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.samplers import Sample
from samplebatch.names import DISCOUNT, RETURNS
from samplebatch.storage.buffers.state import generator_from_state, generator_state
from samplebatch.storage.datasets.dataset import Dataset

if TYPE_CHECKING:
    import torch

    from samplebatch.batch.delivery import Device, Floats


Ints = npt.NDArray[np.int64]


class MixedIndices(NamedTuple):
    """Source and row number of each row in a mixed batch, as accepted by `MixedSampler.update_weight`.

    Attributes
    ----------
    source
        Index of each row's source in the order of `MixedSampler.sources`, shape (n,).
    row
        Row number within the source, shape (n,): a slot of a buffer or a row number of a dataset.
    """

    source: Ints
    row: Ints

    def at(self, rows: npt.NDArray[Any]) -> MixedIndices:
        """Select the indices of some rows of the mixed batch."""
        return MixedIndices(self.source[rows], self.row[rows])


class MixedSampler:
    """Weighted sampler of batches from several sources, such as an offline dataset and an online replay buffer.

    The number of rows from each source is proportional to the weight of the source. Fractional numbers of rows are
    rounded up or down at random, so that the expected numbers are exactly proportional. The weights can be changed at
    any time.

    Parameters
    ----------
    sources
        Replay buffers and datasets by name, in order.
    weights
        Non-negative weight of each source by name, normalized by the sum of all weights. None for equal weights.
    missing
        Handling of columns that some sources lack: `"error"` raises ColumnMismatchError, `"drop"` removes the columns.
        Columns that contain only None or empty dicts are always removed if a source lacks them.
    seed
        Seed of the random order of rows and of random rounding; the sources use their own seeds.

    Raises
    ------
    ArgumentError
        If `sources` is not a non-empty mapping, or the weights are invalid.
    ColumnMismatchError
        If the actions of the sources have different units.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import Dataset, PrioritizedReplayBuffer, ReplayBuffer
    >>> buf = ReplayBuffer(8)
    >>> offline = Dataset(tempfile.mkdtemp() + "/steps")
    >>> path = offline.extend(SampleBatch(obs=[0.0, 1.0], actions=[0, 1], rewards=[1.0, 0.0]))
    >>> for i in range(5):
    ...     added = buf.add(
    ...         Batch(obs=float(i), act=0, rew=1.0, terminated=False, truncated=False)
    ...     )
    >>> sampler = MixedSampler(
    ...     {"offline": offline, "online": buf}, {"offline": 1, "online": 3}, missing="drop"
    ... )
    >>> batch, indices = sampler.sample(8)
    >>> sorted(batch.__dict__), np.bincount(indices.source).tolist()
    (['act', 'obs', 'rew'], [2, 6])
    >>> sampler.weights = {"online": 1.0}
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        missing: Literal["error", "drop"] = "error",
        seed: int = 42,
    ) -> None:
        if not isinstance(sources, Mapping):
            raise errors.ArgumentError(f"sources must be buffers and datasets by name, got a {type(sources).__name__}")
        if not sources:
            raise errors.ArgumentError("sources must be buffers and datasets by name, got an empty mapping")
        self._sources = dict(sources)
        self._missing = choice("missing", missing, ("error", "drop"))
        self._check_units()
        self._rng = np.random.default_rng(seed)
        self.weights = dict.fromkeys(sources, 1.0) if weights is None else weights

    @property
    def weights(self) -> dict[str, float]:
        """Normalized weight of each source; settable. The weight of an omitted source is set to 0."""
        return dict(zip(self._sources, self._shares.tolist(), strict=True))

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        for name in weights:
            if name not in self._sources:
                raise errors.ArgumentError(
                    f"weights must be of the sources, got {name!r}; {errors.near_names(name, self._sources)}"
                )
        shares = np.array([weights.get(name, 0.0) for name in self._sources], np.float64)
        if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
            raise errors.ArgumentError(f"weights must be finite, at least 0 and not all 0, got {dict(weights)}")
        self._shares = shares / shares.sum()

    @property
    def sources(self) -> dict[str, Any]:
        """Sources by name, in order."""
        return dict(self._sources)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the generator state; the states of the sources are not included."""
        return {"shares": self._shares.copy(), "generator": dict(generator_state(self._rng))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`.

        Raises
        ------
        FormatError
            If the state is invalid, or belongs to a sampler with a different number of sources.
        """
        shares = np.asarray(state.get("shares", ()))
        if shares.dtype != np.float64 or shares.shape != self._shares.shape:
            raise errors.FormatError(
                f"the state of a sampler must have {len(self._shares)} shares, got {shares.dtype} {shares.shape}"
            )
        self._rng = generator_from_state(state.get("generator"))
        # Assigned directly: the property would normalize them again.
        self._shares = shares.copy()

    def sample(
        self, batch_size: int, *, device: Device | None = None, floats: Floats | None = None
    ) -> Sample[Batch, MixedIndices]:
        """Sample rows from the sources and shuffle them.

        Parameters
        ----------
        batch_size
            Number of rows, at least 1.
        device, floats
            As in `ReplayBuffer.sample`.

        Returns
        -------
        Sample
            Rows with Tianshou's column names, and the `MixedIndices` of the rows. If a source is prioritized, rows from
            sources without priorities have `weight` 1 and `generation` 0.

        Raises
        ------
        ArgumentError
            If `batch_size` is less than 1, or `floats` is not a floating-point dtype. No rows are sampled.
        DeviceError
            If torch cannot use the device. No rows are sampled.
        EmptyBufferError
            If a source from which rows are requested is empty.
        ColumnMismatchError
            If the sources have different columns and `missing` is `"error"`, or the actions of the sources have
            different units. No rows are sampled.
        """
        delivery = Delivery(device, floats)
        self._check_units()
        edges = np.cumsum(self._shares) * whole("batch_size", batch_size, 1)
        edges[-1] = batch_size
        counts = np.diff(np.floor(edges + self._rng.random()).astype(int), prepend=0)
        batches: dict[str, Batch] = {}
        parts: list[tuple[int, Ints]] = []
        for number, (name, count) in enumerate(zip(self._sources, counts.tolist(), strict=True)):
            if count:
                batches[name], indices = self._draw(name, count)
                parts.append((number, indices))
        source = np.concatenate([np.full(len(indices), number) for number, indices in parts])
        index = np.concatenate([indices for _, indices in parts])
        order = self._rng.permutation(len(source))
        batch = delivery.one(Batch.cat(self._align(batches))[order], tree_to)
        return Sample(batch, MixedIndices(source[order], index[order]))

    def _check_units(self) -> None:
        """Check that the known action units of all sources are equal."""
        units = {name: getattr(source, "action_unit", None) for name, source in self._sources.items()}
        try:
            self._unit = common_unit(units.values())
        except errors.ColumnMismatchError as error:
            labels = ", ".join(f"{name!r} has {unit}" for name, unit in units.items() if unit is not None)
            raise errors.ColumnMismatchError(
                f"column 'actions' must be in one unit to be combined, got {labels}; convert one with "
                "to_environment_actions(), or collect with the same map_action"
            ) from error

    @property
    def action_unit(self) -> ActionUnit | None:
        """Unit of the actions of all sources; None if the unit is unknown.

        Raises
        ------
        ColumnMismatchError
            If the units of the sources differ.
        """
        self._check_units()
        return self._unit

    def _draw(self, name: str, count: int) -> tuple[Batch, Ints]:
        source = self._sources[name]
        if not len(source):
            raise errors.EmptyBufferError(
                f"source {name!r} must have rows to sample from, got none; fill it or set its weight to 0"
            )
        batch, indices = source.sample(count)
        nested = batch.as_batch(convention="tianshou") if isinstance(batch, SampleBatch) else batch
        return nested, np.asarray(indices, np.int64)

    def _align(self, batches: Mapping[str, Batch]) -> list[Batch]:
        """Restrict all batches to the columns that they have in common."""
        columns_by_source = {
            name: {key: value for key, value in batch.__dict__.items() if not _is_reserved(value)}
            for name, batch in batches.items()
        }
        if any(names.WEIGHT in columns for columns in columns_by_source.values()):
            for name, columns in columns_by_source.items():
                rows = len(batches[name])
                columns.setdefault(names.WEIGHT, np.ones(rows))
                columns.setdefault(names.GENERATION, np.zeros(rows, np.int64))
        shared = set.intersection(*map(set, columns_by_source.values()))
        for name, columns in columns_by_source.items():
            other = next((key for key, value in columns.items() if key not in shared and not _is_empty(value)), None)
            if other is not None and self._missing == "error":
                lacking = next(source for source, theirs in columns_by_source.items() if other not in theirs)
                raise errors.ColumnMismatchError(
                    f"column {other!r} must exist in all sources, got it from {name!r} but not from {lacking!r}; "
                    "pass missing='drop' to remove it"
                )
        aligned = []
        for name, columns in columns_by_source.items():
            part = node(Batch, {key: value for key, value in columns.items() if key in shared})
            aligned.append(with_unit_of(batches[name], part))
        return aligned

    def update_weight(
        self,
        index: MixedIndices,
        new_weight: npt.ArrayLike | torch.Tensor,
        *,
        generation: npt.ArrayLike | torch.Tensor | None = None,
    ) -> None:
        """Set the priorities of rows in prioritized sources; rows from other sources are skipped.

        Parameters
        ----------
        index
            Indices returned by `sample`.
        new_weight
            Priorities as an array or a tensor of shape (n,).
        generation
            `generation` of the sampled rows, shape (n,). Priorities of rows that have been overwritten since they were
            sampled are discarded.

        Raises
        ------
        ColumnLengthError, ColumnTypeError, PriorityError
            As in `PrioritizedReplayBuffer.update_weight`.
        """
        weights = as_array(new_weight)
        if weights.shape != index.source.shape:
            raise errors.ArgumentError(f"priorities must be of shape {index.source.shape}, got {weights.shape}")
        generations = None if generation is None else as_array(generation)
        for number, source in enumerate(self._sources.values()):
            rows = np.flatnonzero(index.source == number)
            if len(rows) and hasattr(type(source), "update_weight"):
                sampled = None if generations is None else generations[rows]
                source.update_weight(index.row[rows], weights[rows], generation=sampled)


def _is_reserved(value: Any) -> bool:
    """Return whether a value has no rows, because it is None or contains only reserved names."""
    return value is None or (KINDS[type(value)] == NODE and all(map(_is_reserved, value.__dict__.values())))


def _is_empty(value: Any) -> bool:
    """Return whether all rows of a column are None or empty dicts, as is common for infos."""
    rows = value.ravel().tolist() if isinstance(value, np.ndarray) and value.dtype == object else [value]
    return all(row is None or (isinstance(row, dict) and not row) for row in rows)


class SourceState:
    """Checkpoint state (random generators and any priorities) of data sources that exist before training.

    The state does not include the rows. A source is a replay buffer, `Dataset`, `MixedSampler` or another object with
    `state_dict` and `load_state_dict`. Raises ArgumentError for other objects.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._parts: dict[str, SourceState] = {}
        if isinstance(source, MixedSampler):
            self._parts = {name: SourceState(part) for name, part in source.sources.items()}
        # Checked on the class, because a buffer resolves unknown attributes to columns.
        kind = type(source)
        self._has_generator_alone = isinstance(source, ReplayBuffer) and not hasattr(kind, "update_weight")
        if not self._has_generator_alone and not (hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")):
            raise errors.ArgumentError(
                f"buffer must have state_dict and load_state_dict for checkpoints, got a {kind.__name__}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the source; for a mixed sampler, also the state of each of its sources."""
        if self._has_generator_alone:
            return dict(generator_state(self._source._rng))
        state: dict[str, Any] = self._source.state_dict()
        if not self._parts:
            return state
        return {"sampler": state, "sources": {name: part.state_dict() for name, part in self._parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        if self._has_generator_alone:
            self._source._rng = generator_from_state(state)
            return
        self._source.load_state_dict(state["sampler"] if self._parts else state)
        for name, part in self._parts.items():
            part.load_state_dict(state["sources"][name])


_FOR_TARGETS = ("rew", "terminated", "obs_next")
"""Columns of a step required to compute targets."""


def sample_steps(
    source: Any, sample_size: int | None, *, n_step: int | None, gamma: float, device: Device, floats: Floats
) -> Sample[Batch, Any]:
    """Sample rows from a source that is not a replay buffer; the result has the form of `ReplayBuffer.sample`.

    Each row represents a single step, unless the rows have the columns `returns` and `discount` of `NStepReturns`.

    If `sample_size` is 0 or None, all rows of a dataset are returned in order. If the source is a batch, all rows are
    always returned. Raises ArgumentError if `n_step` exceeds 1 and rows are single steps. Raises ColumnNotFoundError if
    rows lack a column that the computation of targets requires.

    >>> import tempfile
    >>> dataset = Dataset(tempfile.mkdtemp() + "/steps")
    >>> steps = SampleBatch(
    ...     obs=[0.0, 1.0], new_obs=[1.0, 2.0], rewards=[0.5, 1.0], terminateds=[False, True]
    ... )
    >>> path = dataset.extend(steps)
    >>> rows, _ = sample_steps(dataset, 0, n_step=1, gamma=0.9, device="cpu", floats="float32")
    >>> rows.returns, rows.discount
    (tensor([0.5000, 1.0000]), tensor([0.9000, 0.0000]))
    """
    sampled: Any
    if isinstance(source, SampleBatch | Batch):
        sampled, indices = source, np.arange(len(source))
    elif sample_size or not isinstance(source, Dataset):
        sampled, indices = source.sample(sample_size)
    else:
        indices = np.arange(len(source))
        sampled = source.take(indices)
    rows: Batch = sampled.as_batch("tianshou") if isinstance(sampled, SampleBatch) else Batch(sampled)
    if "terminated" not in rows.__dict__ and "done" in rows.__dict__:
        # Older batches have one flag, a termination unless the step is also truncated.
        truncated = rows.__dict__.get("truncated")
        ends = np.asarray(rows.done, bool)
        rows = with_unit_of(
            rows, node(Batch, rows.__dict__ | {"terminated": ends if truncated is None else ends & ~truncated})
        )
    if n_step is not None:
        rows = with_unit_of(rows, node(Batch, rows.__dict__ | _windows(rows.__dict__, n_step, gamma)))
    return Sample(Delivery(device, floats).one(rows, tree_to), indices)


def _windows(columns: dict[str, Any], n_step: int, gamma: float) -> dict[str, Any]:
    """Return the one-step returns and discounts of rows; empty if the rows already contain returns and discounts."""
    for name in _FOR_TARGETS:
        if name not in columns:
            raise errors.ColumnNotFoundError(
                f"rows must have column {name!r} to compute targets, got {', '.join(map(repr, columns))}; "
                "a buffer's extend derives next observations from later steps"
            )
    if RETURNS in columns and DISCOUNT in columns:
        return {}
    if n_step > 1:
        raise errors.ArgumentError(
            f"n_step_return_horizon must be 1 for rows that are single steps, got {n_step}; fill a buffer by extend"
        )
    return {RETURNS: columns["rew"], DISCOUNT: gamma * ~np.asarray(columns["terminated"], bool)}
