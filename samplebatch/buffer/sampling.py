"""Sample: rows with their indices, the result of every `sample` method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

from samplebatch import names
from samplebatch.batch.delivery import tree_to
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Target

BatchT = TypeVar("BatchT", covariant=True)
IndicesT = TypeVar("IndicesT", covariant=True)


class Sample(tuple[BatchT, IndicesT]):
    """Sampled rows and their indices, which unpacks as the pair `batch, indices`.

    Attributes
    ----------
    batch
        The rows: a `Batch`, a list with one `Batch` per episode, a `SampleBatch` or a `MultiAgentBatch`.
    indices
        Row locations in the form that the source's `update_weight` accepts.
    weights
        Importance weights, also a column of the batch; by policy for a `MultiAgentBatch`. None unless rows were sampled
        by priority.
    generation
        Generation of each row's slot, for `update_weight`; None if the source has none.

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

    def __new__(cls, batch: Any, indices: Any, weights: Any = None, generation: Any = None) -> Self:  # noqa: D102
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
        """Importance weights of the rows, or None."""
        return self._column("weights", names.WEIGHT, "weights")

    @property
    def generation(self) -> Any:
        """Generation of each row's slot, or None."""
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
    """Convert the rows of a sample to a delivery target; indices are unchanged."""
    converted: Sample[BatchT, IndicesT] = Sample(_convert(sample[0], target), sample[1])
    converted.__dict__.update(sample.__dict__)
    return converted


def _convert(batch: Any, target: Target) -> Any:
    if isinstance(batch, list):
        return [_convert(part, target) for part in batch]
    return tree_to(batch, target) if isinstance(batch, Batch) else batch._to(target)
