"""MixedSampler: batches of rows from datasets and replay buffers, by a ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import choice, whole
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE
from samplebatch.batch.nested.tensors import as_array, tree_to
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import ArgumentError, ColumnMismatchError, EmptyBufferError, FormatError, near_names
from samplebatch.storage.buffer_state import generator_from_state, generator_state

if TYPE_CHECKING:
    import torch

    from samplebatch.batch.delivery import Device
    from samplebatch.batch.targets import Floats

Ints = npt.NDArray[np.int64]


class MixedIndices(NamedTuple):
    """Where the rows of a mixed batch came from, shape (n,) each; taken by `MixedSampler.update_weight`.

    Attributes
    ----------
    source
        The number of each row's source, in the order in which sources were given.
    row
        Its number there: a slot of a buffer, a row of a dataset.
    """

    source: Ints
    row: Ints


class MixedSampler:
    """Samples from several sources at once, such as an offline dataset and an online replay buffer.

    Each batch has rows of each source in proportion to the sources' weights; where that is no whole number of rows,
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

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import Dataset, PrioritizedReplayBuffer, ReplayBuffer
    >>> buf = ReplayBuffer(8)
    >>> offline = Dataset(tempfile.mkdtemp() + "/steps")
    >>> path = offline.append(SampleBatch(obs=[0.0, 1.0], actions=[0, 1], rewards=[1.0, 0.0]))
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
    ) -> tuple[Batch, MixedIndices]:
        """Draw rows from the sources, and mix them.

        Parameters
        ----------
        batch_size
            How many, at least 1.
        device, floats
            As `ReplayBuffer.sample` takes them.

        Returns
        -------
        batch
            The rows, under Tianshou's names. If a source is prioritized, `weight` is 1 and `generation` 0 in the rows
            of others.
        indices
            Where they came from.

        Raises
        ------
        ArgumentError
            If `batch_size` is no whole number from 1 on, or `floats` no floating-point dtype. Nothing is drawn then.
        DeviceError
            If torch cannot use the device. Nothing is drawn then.
        EmptyBufferError
            If a source of which rows are to be drawn has none; names it.
        ColumnMismatchError
            If columns differ, and are not to be dropped; names one, and the source that lacks it.
        """
        delivery = Delivery(device, floats)
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
        return batch, MixedIndices(source[order], index[order])

    def _draw(self, name: str, count: int) -> tuple[Batch, Ints]:
        source = self._sources[name]
        if not len(source):
            raise EmptyBufferError(f"source {name!r} must have rows to draw from, it has none; or give it weight 0")
        batch, indices = source.sample(count)
        nested = batch.as_batch(names="tianshou") if isinstance(batch, SampleBatch) else batch
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
        return [Batch({key: value for key, value in columns.items() if key in shared}) for columns in held.values()]

    def update_weight(self, batch: Batch, indices: MixedIndices, new_weight: npt.ArrayLike | torch.Tensor) -> None:
        """Give the rows of a batch new priorities, in the buffers that they came from.

        Rows of sources without priorities are passed over, and so are those that were written over since.

        Parameters
        ----------
        batch, indices
            As `sample` returned them.
        new_weight
            Priorities, shape (n,); an array or a tensor.

        Raises
        ------
        ColumnLengthError, ColumnTypeError, PriorityError
            As `PrioritizedReplayBuffer.update_weight` does.
        """
        given = as_array(new_weight)
        if given.shape != indices.source.shape:
            raise ArgumentError(f"priorities must be of shape {indices.source.shape}, got {given.shape}")
        for number, source in enumerate(self._sources.values()):
            rows = np.flatnonzero(indices.source == number)
            if len(rows) and hasattr(source, "update_weight"):
                generation = as_array(batch[names.GENERATION])[rows]
                source.update_weight(indices.row[rows], given[rows], generation=generation)


def _is_reserved(value: Any) -> bool:
    """Tell whether a value of a batch is None or has reserved names alone: it has no rows."""
    return value is None or (KINDS[type(value)] == NODE and all(map(_is_reserved, value.__dict__.values())))


def _is_empty(value: Any) -> bool:
    """Tell whether all rows of a column are None or dicts without keys, such as the infos of most environments."""
    rows = value.ravel().tolist() if isinstance(value, np.ndarray) and value.dtype == object else [value]
    return all(row is None or (isinstance(row, dict) and not row) for row in rows)
