"""MixedSampler: batches of rows from datasets and replay buffers, by a ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import choice, whole
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.batch.delivery import Delivery, as_array, tree_to
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, node, with_unit_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.sampling import Sample
from samplebatch.errors import (
    ArgumentError,
    ColumnMismatchError,
    ColumnNotFoundError,
    EmptyBufferError,
    FormatError,
    near_names,
)
from samplebatch.names import DISCOUNT, RETURNS
from samplebatch.storage.buffers.state import generator_from_state, generator_state
from samplebatch.storage.datasets.dataset import Dataset

if TYPE_CHECKING:
    import torch

    from samplebatch.batch.delivery import Device, Floats


Ints = npt.NDArray[np.int64]


class MixedIndices(NamedTuple):
    """Where the rows of a mixed batch came from, shape (n,) each; for `MixedSampler.update_weight`.

    Attributes
    ----------
    source
        The number of each row's source, in the order in which sources were given.
    row
        Its number there: a slot of a buffer, a row of a dataset.
    """

    source: Ints
    row: Ints

    def at(self, rows: npt.NDArray[Any]) -> MixedIndices:
        """Return the indices of some of the rows."""
        return MixedIndices(self.source[rows], self.row[rows])


class MixedSampler:
    """Samples from several sources at once, such as an offline dataset and an online replay buffer.

    Each batch has rows of each source in proportion to the sources' weights; where that is not a whole number of rows,
    one more or less is drawn so that it is so in the mean. The weights may change at any time.

    Parameters
    ----------
    sources
        Replay buffers and datasets by name, in order.
    weights
        The share of each source, by name: numbers from 0 on, of which the sum counts. Equal ones if None.
    missing
        What is to be done about columns that some sources have and others have not: `"error"` raises, `"drop"` leaves
        them out. Columns whose rows are all None or empty dicts are left out in any case.
    seed
        Seed of the order of rows, and of the numbers of rows.

    Raises
    ------
    ArgumentError
        If sources are no mapping or an empty one, or weights are none.
    ColumnMismatchError
        If the actions of sources are in different units.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import Dataset, PrioritizedReplayBuffer, ReplayBuffer
    >>> buf = ReplayBuffer(8)
    >>> offline = Dataset(tempfile.mkdtemp() + "/steps")
    >>> path = offline.extend(SampleBatch(obs=[0.0, 1.0], actions=[0, 1], rewards=[1.0, 0.0]))
    >>> for i in range(5):
    ...     added = buf.add(Batch(obs=float(i), act=0, rew=1.0, terminated=False, truncated=False))
    >>> sampler = MixedSampler({"offline": offline, "online": buf}, {"offline": 1, "online": 3}, missing="drop")
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
            raise ArgumentError(f"sources must be buffers and datasets by name, got a {type(sources).__name__}")
        if not sources:
            raise ArgumentError("sources must be buffers and datasets by name, there are none")
        self._sources = dict(sources)
        self._missing = choice("missing", missing, ("error", "drop"))
        self._check_units()
        self._rng = np.random.default_rng(seed)
        self.weights = dict.fromkeys(sources, 1.0) if weights is None else weights

    @property
    def weights(self) -> dict[str, float]:
        """The share of each source; may be set, and those left out are 0 then."""
        return dict(zip(self._sources, self._shares.tolist(), strict=True))

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        for name in weights:
            if name not in self._sources:
                raise ArgumentError(f"weights must be of the sources, got {name!r}; {near_names(name, self._sources)}")
        shares = np.array([weights.get(name, 0.0) for name in self._sources], np.float64)
        if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
            raise ArgumentError(f"weights must be numbers from 0 on, and not all of them 0, got {dict(weights)}")
        self._shares = shares / shares.sum()

    @property
    def sources(self) -> dict[str, Any]:
        """The sources by name, in order."""
        return dict(self._sources)

    def state_dict(self) -> dict[str, Any]:
        """Return the shares and the state of the generator; those of the sources are their own."""
        return {"shares": self._shares.copy(), "generator": dict(generator_state(self._rng))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Mix on from a state that `state_dict` returned.

        Raises
        ------
        FormatError
            If it is of another number of sources, or of something else.
        """
        shares = np.asarray(state.get("shares", ()))
        if shares.dtype != np.float64 or shares.shape != self._shares.shape:
            raise FormatError(f"the state of a sampler must have {len(self._shares)} shares, it has not")
        self._rng = generator_from_state(state.get("generator"))
        # As they were: the property would divide them by their sum once more.
        self._shares = shares.copy()

    def sample(
        self, batch_size: int, *, device: Device | None = None, floats: Floats | None = None
    ) -> Sample[Batch, MixedIndices]:
        """Draw rows from the sources, and mix them.

        Parameters
        ----------
        batch_size
            How many, at least 1.
        device, floats
            As `ReplayBuffer.sample` takes them.

        Returns
        -------
        Sample
            The rows, under Tianshou's names, and where they came from. If a source is prioritized, `weight` is 1 and
            `generation` 0 in the rows of others.

        Raises
        ------
        ArgumentError
            If `batch_size` is less than 1, or `floats` no floating-point dtype. Nothing is drawn then.
        DeviceError
            If torch cannot use the device. Nothing is drawn then.
        EmptyBufferError
            If a source of which rows are to be drawn has none; names it.
        ColumnMismatchError
            If columns differ, and are not to be dropped; names one, and the source that lacks it. If the actions of
            sources are in different units; nothing is drawn then.
        """
        delivery = Delivery(device, floats)
        self._check_units()
        edges = np.cumsum(self._shares) * whole("batch_size", batch_size, 1)
        edges[-1] = batch_size
        counts = np.diff(np.floor(edges + self._rng.random()).astype(int), prepend=0)
        drawn: dict[str, Batch] = {}
        found: list[tuple[int, Ints]] = []
        for number, (name, count) in enumerate(zip(self._sources, counts.tolist(), strict=True)):
            if count:
                drawn[name], indices = self._draw(name, count)
                found.append((number, indices))
        source = np.concatenate([np.full(len(indices), number) for number, indices in found])
        index = np.concatenate([indices for _, indices in found])
        order = self._rng.permutation(len(source))
        batch = delivery.one(Batch.cat(self._align(drawn))[order], tree_to)
        return Sample(batch, MixedIndices(source[order], index[order]))

    def _check_units(self) -> None:
        """Check that the actions of all sources are in one unit, as far as these are known by now."""
        units = {name: getattr(source, "action_unit", None) for name, source in self._sources.items()}
        try:
            self._unit = common_unit(units.values())
        except ColumnMismatchError as error:
            known = ", ".join(f"{name!r} has {unit}" for name, unit in units.items() if unit is not None)
            raise ColumnMismatchError(
                f"column 'actions' must be in one unit in all sources: {known}; convert what a source has by "
                "to_environment_actions(), or collect it with the same map_action"
            ) from error

    @property
    def action_unit(self) -> ActionUnit | None:
        """The unit of the actions of all sources; None if unknown.

        Raises
        ------
        ColumnMismatchError
            If sources have come to have different units.
        """
        self._check_units()
        return self._unit

    def _draw(self, name: str, count: int) -> tuple[Batch, Ints]:
        source = self._sources[name]
        if not len(source):
            raise EmptyBufferError(f"source {name!r} must have rows to draw from, it has none; or give it weight 0")
        batch, indices = source.sample(count)
        nested = batch.as_batch(convention="tianshou") if isinstance(batch, SampleBatch) else batch
        return nested, np.asarray(indices, np.int64)

    def _align(self, drawn: Mapping[str, Batch]) -> list[Batch]:
        """Give all batches the same columns."""
        held = {
            name: {key: value for key, value in batch.__dict__.items() if not _is_reserved(value)}
            for name, batch in drawn.items()
        }
        if any(names.WEIGHT in columns for columns in held.values()):
            for name, columns in held.items():
                rows = len(drawn[name])
                columns.setdefault(names.WEIGHT, np.ones(rows))
                columns.setdefault(names.GENERATION, np.zeros(rows, np.int64))
        shared = set.intersection(*map(set, held.values()))
        for name, columns in held.items():
            other = next((key for key, value in columns.items() if key not in shared and not _is_empty(value)), None)
            if other is not None and self._missing == "error":
                lacking = next(own for own, theirs in held.items() if other not in theirs)
                raise ColumnMismatchError(
                    f"column {other!r} must be in all sources, {name!r} has it and {lacking!r} has not; "
                    "pass missing='drop' to leave it out"
                )
        aligned = []
        for name, columns in held.items():
            part = node(Batch, {key: value for key, value in columns.items() if key in shared})
            aligned.append(with_unit_of(drawn[name], part))
        return aligned

    def update_weight(
        self,
        index: MixedIndices,
        new_weight: npt.ArrayLike | torch.Tensor,
        *,
        generation: npt.ArrayLike | torch.Tensor | None = None,
    ) -> None:
        """Give rows new priorities, in the buffers that they came from; rows of other sources are skipped.

        Parameters
        ----------
        index
            The rows, as `sample` returned them.
        new_weight
            Priorities, shape (n,); an array or a tensor.
        generation
            The `generation` of the rows when they were sampled, shape (n,): priorities of rows that have been
            overwritten since are dropped then.

        Raises
        ------
        ColumnLengthError, ColumnTypeError, PriorityError
            As `PrioritizedReplayBuffer.update_weight` does.
        """
        weights = as_array(new_weight)
        if weights.shape != index.source.shape:
            raise ArgumentError(f"priorities must be of shape {index.source.shape}, got {weights.shape}")
        generations = None if generation is None else as_array(generation)
        for number, source in enumerate(self._sources.values()):
            rows = np.flatnonzero(index.source == number)
            if len(rows) and hasattr(type(source), "update_weight"):
                sampled = None if generations is None else generations[rows]
                source.update_weight(index.row[rows], weights[rows], generation=sampled)


def _is_reserved(value: Any) -> bool:
    """Return whether a value of a batch has no rows: None, or reserved names only."""
    return value is None or (KINDS[type(value)] == NODE and all(map(_is_reserved, value.__dict__.values())))


def _is_empty(value: Any) -> bool:
    """Return whether all rows of a column are None or empty dicts, such as most environments' infos."""
    rows = value.ravel().tolist() if isinstance(value, np.ndarray) and value.dtype == object else [value]
    return all(row is None or (isinstance(row, dict) and not row) for row in rows)


class SourceState:
    """State of rows that exist before training, as a part of checkpoints: generators, and priorities if any.

    The rows themselves are the user's. A source is a replay buffer, `Dataset` or `MixedSampler`, or another with
    `state_dict` and `load_state_dict`; others raise ArgumentError.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._parts: dict[str, SourceState] = {}
        if isinstance(source, MixedSampler):
            self._parts = {name: SourceState(part) for name, part in source.sources.items()}
        # The class is looked at, as a buffer goes through its columns for names that it has not.
        kind = type(source)
        self._has_generator_alone = isinstance(source, ReplayBuffer) and not hasattr(kind, "update_weight")
        if not self._has_generator_alone and not (hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")):
            raise ArgumentError(
                f"buffer must have state_dict and load_state_dict for checkpoints, got a {kind.__name__}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state; of a mixed sampler, with the states of its sources."""
        if self._has_generator_alone:
            return dict(generator_state(self._source._rng))
        state: dict[str, Any] = self._source.state_dict()
        if not self._parts:
            return state
        return {"sampler": state, "sources": {name: part.state_dict() for name, part in self._parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw on from a state."""
        if self._has_generator_alone:
            self._source._rng = generator_from_state(state)
            return
        self._source.load_state_dict(state["sampler"] if self._parts else state)
        for name, part in self._parts.items():
            part.load_state_dict(state["sources"][name])


_FOR_TARGETS = ("rew", "terminated", "obs_next")
"""The columns of a step that targets are made of."""


def sample_steps(
    source: Any, sample_size: int | None, *, n_step: int | None, gamma: float, device: Device, floats: Floats
) -> Sample[Batch, Any]:
    """Draw rows of a source that is no replay buffer, as `ReplayBuffer.sample` would return them.

    Rows stand for single steps; those that have `returns` and `discount` already, as `NStepReturns` adds them where
    steps are collected, for as many as these.

    Without a `sample_size`, all rows of a dataset come in order; a batch always gives all of its rows. Raises
    ArgumentError if single steps are to represent several, and ColumnNotFoundError if rows lack a column that targets
    need.

    Examples
    --------
    >>> import tempfile
    >>> dataset = Dataset(tempfile.mkdtemp() + "/steps")
    >>> steps = SampleBatch(obs=[0.0, 1.0], new_obs=[1.0, 2.0], rewards=[0.5, 1.0], terminateds=[False, True])
    >>> path = dataset.extend(steps)
    >>> rows, _ = sample_steps(dataset, 0, n_step=1, gamma=0.9, device="cpu", floats="float32")
    >>> rows.returns, rows.discount
    (tensor([0.5000, 1.0000]), tensor([0.9000, 0.0000]))
    """
    drawn: Any
    if isinstance(source, SampleBatch | Batch):
        drawn, indices = source, np.arange(len(source))
    elif sample_size or not isinstance(source, Dataset):
        drawn, indices = source.sample(sample_size)
    else:
        indices = np.arange(len(source))
        drawn = source.take(indices)
    rows: Batch = drawn.as_batch("tianshou") if isinstance(drawn, SampleBatch) else Batch(drawn)
    if "terminated" not in rows.__dict__ and "done" in rows.__dict__:
        # Older batches have one flag, which is a termination unless the step is marked as truncated.
        truncated = rows.__dict__.get("truncated")
        ends = np.asarray(rows.done, bool)
        rows = with_unit_of(
            rows, node(Batch, rows.__dict__ | {"terminated": ends if truncated is None else ends & ~truncated})
        )
    if n_step is not None:
        rows = with_unit_of(rows, node(Batch, rows.__dict__ | _windows(rows.__dict__, n_step, gamma)))
    return Sample(Delivery(device, floats).one(rows, tree_to), indices)


def _windows(held: dict[str, Any], n_step: int, gamma: float) -> dict[str, Any]:
    """Return the sums of rewards and the factors of estimates of rows."""
    for name in _FOR_TARGETS:
        if name not in held:
            raise ColumnNotFoundError(
                f"rows must have column {name!r} to make targets of, there are {', '.join(map(repr, held))}; "
                "a buffer's extend knows next observations by the steps that follow"
            )
    if RETURNS in held and DISCOUNT in held:
        return {}
    if n_step > 1:
        raise ArgumentError(
            f"n_step_return_horizon must be 1 for rows that are single steps, got {n_step}; fill a buffer by extend"
        )
    return {RETURNS: held["rew"], DISCOUNT: gamma * ~np.asarray(held["terminated"], bool)}
