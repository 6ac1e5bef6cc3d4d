"""Sampling strategies of buffers, and `Sample`, the result of sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import isnan, log
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.delivery import tree_to
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.sum_tree import SumTree
from samplebatch.buffer.table import SAMPLED, Table
from samplebatch.errors import EmptyBufferError, PriorityError

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Target


BatchT = TypeVar("BatchT", covariant=True)
IndicesT = TypeVar("IndicesT", covariant=True)


class Sample(tuple[BatchT, IndicesT]):
    """Sampled rows and their indices; unpacks as the pair `batch, indices`.

    Attributes
    ----------
    batch
        The rows: a `Batch`, a list with one `Batch` per episode, a `SampleBatch` or a `MultiAgentBatch`.
    indices
        Locations of the rows, in the form that the `update_weight` method of the source accepts.
    weights
        Importance weights, which are also a column of the batch; for a `MultiAgentBatch`, a dict by policy. None if
        rows were not sampled by priority.
    generation
        Generation of each row's slot, for `update_weight`; None if the source has no generations.

    Examples
    --------
    >>> from samplebatch import PrioritizedReplayBuffer
    >>> buf = PrioritizedReplayBuffer(4, alpha=1.0, beta=1.0)
    >>> added = buf.add(Batch(obs=7, act=0, rew=1.0, terminated=False, truncated=False))
    >>> sample = buf.sample(2)
    >>> batch, indices = sample
    >>> indices, sample.weights, sample.generation
    (array([0, 0]), array([1., 1.]), array([0, 0]))
    """

    def __new__(cls, batch: Any, indices: Any, weights: Any = None, generation: Any = None) -> Self:
        sample = tuple.__new__(cls, (batch, indices))
        if weights is not None or generation is not None:
            sample.__dict__.update(weights=weights, generation=generation)
        return sample

    def __getnewargs__(self) -> tuple[BatchT, IndicesT]:
        return self[0], self[1]

    @property
    def batch(self) -> BatchT:
        """The rows."""
        return self[0]

    @property
    def indices(self) -> IndicesT:
        """Row locations."""
        return self[1]

    @property
    def weights(self) -> Any:
        """Importance weights of the rows; None if rows were not sampled by priority."""
        return self._column("weights", names.WEIGHT, "weights")

    @property
    def generation(self) -> Any:
        """Generation of each row's slot; None if the source has no generations."""
        return self._column("generation", names.GENERATION, names.GENERATION)

    def _column(self, attribute: str, nested: str, flat: str) -> Any:
        value = self.__dict__.get(attribute)
        if value is not None:
            return value
        batch = self[0]
        if isinstance(batch, Batch):
            return batch.__dict__.get(nested)
        if isinstance(batch, SampleBatch):
            return batch.get(flat)
        if isinstance(batch, MultiAgentBatch):
            columns = {policy: part[flat] for policy, part in batch.items() if flat in part}
            return columns or None
        return None


def convert_sample(sample: Sample[BatchT, IndicesT], target: Target) -> Sample[BatchT, IndicesT]:
    """Convert the rows of a sample to the device and dtypes that `delivery` specifies; indices are unchanged."""
    converted: Sample[BatchT, IndicesT] = Sample(_convert(sample[0], target), sample[1])
    converted.__dict__.update(sample.__dict__)
    return converted


def _convert(batch: Any, target: Target) -> Any:
    if isinstance(batch, list):
        return [_convert(part, target) for part in batch]
    return tree_to(batch, target) if isinstance(batch, Batch) else batch._to(target)


_ROUNDS = 3
"""Rejection sampling rounds before all rows are searched."""


class Sampler(ABC):
    """Sampling strategy that selects slots of a table, used by `ReplayBuffer`.

    listens: whether the sampler must be notified of added and removed rows.
    """

    listens: ClassVar[bool] = False

    @abstractmethod
    def draw(self, table: Table, ring: int | None, count: int, rng: np.random.Generator) -> Ints:
        """Sample `count` slots that have rows, from one ring or from all rings."""

    def on_add(self, slots: Ints) -> None:
        """Update the sampler's state for rows that have been written to slots."""
        return None

    def on_remove(self, slots: Ints) -> None:
        """Update the sampler's state for slots that no longer have rows."""
        return None

    def on_move(self, slots: Ints, state: Any) -> None:
        """Update the state for rows that moved to `slots`, shape (n,); `state` is the `state_dict` of the old slots."""
        return None

    def columns(self, table: Table, slots: Ints) -> dict[str, Any]:
        """Return the columns that the sampler adds to rows, such as importance weights, in the shape of `slots`."""
        return {}

    @abstractmethod
    def state_dict(self, slots: Ints) -> Any:
        """Return the state of the sampler and of the given slots, shape (n,), for `from_state_dict`."""

    @classmethod
    @abstractmethod
    def from_state_dict(cls, capacity: int, slots: Ints, state: Any) -> Self:
        """Create a sampler for a table with `capacity` slots from the `state_dict` of `slots`, shape (n,)."""


class Uniform(Sampler):
    """Uniform sampling.

    frames: number of frames in a complete stack; only rows with a complete stack are sampled.
    """

    def __init__(self, frames: int = 1) -> None:
        self.frames = frames

    def draw(self, table: Table, ring: int | None, count: int, rng: np.random.Generator) -> Ints:
        if self.frames < 2:
            return table.rings.draw(count, rng, ring)
        slots = np.zeros(0, np.intp)
        for _ in range(_ROUNDS):
            missing = count - len(slots)
            picked = table.rings.draw(missing + missing // 4 + 4, rng, ring)
            complete = picked[table.rings.has_frames(picked, self.frames, table.done)]
            slots = np.concatenate([slots, complete]) if len(slots) else complete
            if len(slots) >= count:
                return slots[:count]
        every = complete_stacks(table, ring, self.frames)
        if not len(every):
            raise EmptyBufferError(
                f"a buffer with sample_avail must have a row with {self.frames} frames to sample, got none; "
                "add more steps, or remove sample_avail"
            )
        return np.concatenate([slots, every[rng.integers(0, len(every), count - len(slots))]])

    def state_dict(self, slots: Ints) -> int:
        return self.frames

    @classmethod
    def from_state_dict(cls, capacity: int, slots: Ints, state: Any) -> Self:
        return cls(int(state))


def complete_stacks(table: Table, ring: int | None, frames: int) -> Ints:
    """Return the slots of all rows with a complete stack in one ring or all rings, oldest first per ring."""
    every = table.rings.chronological(ring)
    if frames < 2 or not len(every):
        return every
    return every[table.rings.has_frames(every, frames, table.done)]


def draw_limited(
    table: Table,
    ring: int | None,
    sampler: Sampler,
    batch_size: int | None,
    rng: np.random.Generator,
    max_age: int | None,
    once: bool,
    frames: int,
) -> Ints:
    """Sample slots from each ring's newest `max_age` rows; if `once`, only slots of unmarked rows.

    If the sampler has priorities, the probability of a row is proportional to its weight. If `once`, unmarked rows are
    sampled without replacement and then marked; fewer than `batch_size` slots may be returned.
    """
    newest = whole("max_age", table.rings.capacity if max_age is None else max_age, 0 if max_age is None else 1)
    candidates = table.rings.newest(newest, ring)
    if frames > 1 and len(candidates):
        candidates = candidates[table.rings.has_frames(candidates, frames, table.done)]
    if once and SAMPLED in table.columns.tree:
        candidates = candidates[~table.columns.tree[SAMPLED].values[candidates]]
    if batch_size is not None and batch_size < 0:
        return candidates[:0]
    if batch_size is None:
        slots = rng.permutation(candidates)
    elif batch_size == 0:
        slots = candidates
    else:
        if not len(candidates):
            raise EmptyBufferError("a buffer must have rows to sample within max_age and once, got none")
        slots = draw_from(candidates, sampler, min(batch_size, len(candidates)) if once else batch_size, rng, not once)
    if once and len(slots):
        table.mark_sampled(slots)
    return slots


def draw_from(candidates: Ints, sampler: Sampler, count: int, rng: np.random.Generator, replace: bool = True) -> Ints:
    """Sample `count` of the candidate slots, by priority if the sampler has priorities, otherwise uniformly."""
    if not isinstance(sampler, Prioritized):
        picks = rng.integers(0, len(candidates), count) if replace else rng.permutation(len(candidates))[:count]
        return candidates[picks]
    weights = sampler.tree.get(candidates)
    return rng.choice(candidates, count, replace, weights / weights.sum())


Floats = npt.NDArray[np.float64]

EPSILON: Final = float(np.finfo(np.float32).eps)
"""Added to every priority, so that rows with an error of 0 are still sampled."""

_LOG_FLOAT32_MAX: Final = float(np.log(np.finfo(np.float32).max))


class Prioritized(Sampler):
    r"""Proportional prioritized experience replay (arXiv:1511.05952).

    A row of priority p is sampled with probability proportional to :math:`w = (|p| + \epsilon)^\alpha`. The importance
    weight :math:`(w / p_{min})^{-\beta}` compensates for the sampling frequency; :math:`p_{min}` is the smallest
    priority that has been set so far. If `weight_norm` is true, importance weights are divided by the largest
    importance weight among the rows that one call reads. The formula is the same as in Tianshou; after the division,
    the weights equal the paper's weights, :math:`(N P)^{-\beta} / \max (N P)^{-\beta}`.

    alpha: priority exponent of at least 0; 0 for uniform sampling.
    beta: importance exponent of at least 0; 0 for equal importance weights.
    weight_norm: whether to divide importance weights by the largest importance weight.
    stratified: whether each of n draws covers one of n equal intervals of the total priority, which reduces the
        variance of the sampling frequencies.

    largest, smallest: largest and smallest priority that has been set so far, initially 1. A new row receives the
        largest priority.
    new_weight: weight of a new row, which is the largest priority to the power of alpha, computed in the dtype of the
        priority.
    mirror: array of length `capacity` with a copy of all weights, for example in a file; None for no copy.

    Raises PriorityError if alpha or beta is negative or not a number.
    """

    listens: ClassVar[bool] = True

    def __init__(
        self, capacity: int, alpha: float, beta: float, *, weight_norm: bool = True, stratified: bool = False
    ) -> None:
        self.alpha = exponent("alpha", alpha)
        self.beta = exponent("beta", beta)
        self.weight_norm = bool(weight_norm)
        self.stratified = bool(stratified)
        self.largest = self.smallest = self.new_weight = 1.0
        self.tree = SumTree(capacity)
        self.mirror: Floats | None = None

    def _set(self, slots: Ints, weights: Any) -> None:
        self.tree.set(slots, weights)
        self._reflect(slots)

    def _reflect(self, slots: Ints) -> None:
        if self.mirror is not None:
            self.mirror[slots] = self.tree.get(slots)

    def draw(self, table: Table, ring: int | None, count: int, rng: np.random.Generator) -> Ints:
        rings = table.rings
        if not (len(rings) if ring is None else rings.sizes_of_all()[ring]):
            raise EmptyBufferError("a buffer must have rows to sample, got an empty buffer; add some first")
        start, stop = (0, rings.capacity) if ring is None else map(int, rings.edges[ring : ring + 2])
        return self.tree.draw(count, rng, start, stop, stratified=self.stratified)

    def on_add(self, slots: Ints) -> None:
        self._set(slots, self.new_weight)

    def on_remove(self, slots: Ints) -> None:
        self._set(slots, 0.0)

    def on_move(self, slots: Ints, state: dict[str, Any]) -> None:
        self._set(slots, state["weights"])

    def columns(self, table: Table, slots: Ints) -> dict[str, Any]:
        """Return the columns with the importance weights of rows and the generations of the rows' slots."""
        weights = self.importance(slots)
        if self.weight_norm and weights.size:
            largest = weights.max()
            if largest > 0.0:
                weights /= largest
        return {names.WEIGHT: weights, names.GENERATION: table.rings.generation(slots)}

    def importance(self, slots: Ints) -> Floats:
        """Return unnormalized importance weights in the shape of `slots`; the weight of a slot without a row is 0."""
        weights: Floats = self.tree.get(slots)
        missing = None
        if np.count_nonzero(weights) < weights.size:
            missing = weights == 0.0
            weights[missing] = 1.0
        weights /= self.smallest
        np.power(weights, -self.beta, out=weights)
        if missing is not None:
            weights[missing] = 0.0
        return weights

    def update(self, slots: Ints, priorities: npt.NDArray[np.floating[Any]]) -> None:
        """Set priorities of slots from C-contiguous arrays, shape (n,) each.

        For duplicate slots, the last priority wins.

        The power of alpha is computed in the dtype of the priorities, float32 or float64.
        """
        if not len(slots):
            return
        sizes, peak = self.sizes(priorities)
        smallest, largest = float(sizes.min()), float(peak)
        if sizes.dtype != np.float64 and self.alpha * log(largest) > _LOG_FLOAT32_MAX:
            sizes, peak = sizes.astype(np.float64), peak.astype(np.float64)
        self.tree.put(slots, (sizes**self.alpha).astype(np.float64, copy=False))
        self._reflect(slots)
        if largest > self.largest:
            self.largest, self.new_weight = largest, float(peak**self.alpha)
        self.smallest = min(self.smallest, smallest)

    def sizes(self, priorities: npt.NDArray[np.floating[Any]]) -> tuple[Floats, np.floating[Any]]:
        """Return the magnitudes of one or more priorities, each plus a small constant, and the largest magnitude."""
        sizes = np.abs(priorities)
        sizes += EPSILON
        peak = sizes.max()
        largest = float(peak)
        if not largest < np.inf or self.alpha * log(largest) > log(self.tree.limit):
            value = "NaN" if isnan(largest) else f"{largest:g}"
            raise PriorityError(
                f"the sum of priorities to the power of alpha must be finite, got a priority of {value}"
            )
        return sizes, peak

    def state_dict(self, slots: Ints) -> dict[str, Any]:
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "weight_norm": self.weight_norm,
            "stratified": self.stratified,
            "largest": self.largest,
            "smallest": self.smallest,
            "new_weight": self.new_weight,
            "weights": self.tree.get(slots),
        }

    @classmethod
    def from_state_dict(cls, capacity: int, slots: Ints, state: dict[str, Any]) -> Self:
        names = ("weight_norm", "stratified")
        sampler = cls(capacity, state["alpha"], state["beta"], **{name: state[name] for name in names})
        sampler.largest, sampler.smallest = float(state["largest"]), float(state["smallest"])
        # States of older versions and of Tianshou lack it.
        sampler.new_weight = float(state.get("new_weight", sampler.largest**sampler.alpha))
        sampler.tree.set(slots, state["weights"])
        return sampler


def exponent(name: str, value: float) -> float:
    """Validate a non-negative exponent.

    >>> exponent("beta", 1)
    1.0
    >>> exponent("beta", -1)
    Traceback (most recent call last):
    samplebatch.errors.PriorityError: beta must be a number from 0, got -1
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0.0 <= value < np.inf:
        raise PriorityError(f"{name} must be a number from 0, got {value!r}")
    return float(value)
