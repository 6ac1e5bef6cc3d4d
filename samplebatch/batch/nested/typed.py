"""Protocols of common nested batches, for type checkers and editors.

Type checkers accept a `Batch` for every protocol without a cast. Protocols are generic in the array type, as in
`RolloutBatch[npt.NDArray[Any]]` or `RolloutBatch[torch.Tensor]`. Protocols are not checked at run time.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributions import Distribution

    from samplebatch.batch.nested.batch import Batch

A = TypeVar("A")


class AnyBatch(Protocol):
    """Methods of every nested batch, for annotations."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Self]: ...
    @overload
    def __getitem__(self, index: str) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> Self: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __contains__(self, name: object) -> bool: ...
    def get_keys(self) -> KeysView[str]:
        """Return the names."""
        ...

    def keys(self) -> KeysView[str]:
        """Return the names."""
        ...

    def values(self) -> ValuesView[Any]:
        """Return the values."""
        ...

    def items(self) -> ItemsView[str, Any]:
        """Return names and values."""
        ...

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a name, or the default."""
        ...

    def pop(self, key: str, default: Any = None) -> Any:
        """Remove a name and return its value, or the default."""
        ...

    def copy(self) -> Self:
        """Deep-copy the batch."""
        ...

    def split(
        self, size: int, shuffle: bool = True, merge_last: bool = False, *, rng: np.random.Generator | None = None
    ) -> Iterator[Self]:
        """Yield batches of `size` rows."""
        ...

    def to_torch(self, dtype: torch.dtype | None = None, device: str | int | torch.device = "cpu") -> Batch:
        """Return a batch of tensors."""
        ...

    def to_numpy(self) -> Batch:
        """Return a batch of arrays."""
        ...


class ObsBatch(AnyBatch, Protocol[A]):
    """Observations and infos."""

    obs: A
    info: Any


class RolloutBatch(ObsBatch[A], Protocol[A]):
    """Transitions: observations, actions, rewards, flags and next observations."""

    act: A
    rew: A
    terminated: A
    truncated: A
    done: A
    obs_next: A
    policy: Any


class PrioritizedBatch(RolloutBatch[A], Protocol[A]):
    """Transitions sampled by priority, with importance weights."""

    weight: A


class ReturnsBatch(RolloutBatch[A], Protocol[A]):
    """Transitions with their returns."""

    returns: A


class AdvantagesBatch(ReturnsBatch[A], Protocol[A]):
    """Transitions with returns, advantages and state values."""

    adv: A
    v_s: A


class LogpOldBatch(AdvantagesBatch[A], Protocol[A]):
    """Transitions with advantages and the behaviour policy's log-probability of the action."""

    logp_old: A


class ActBatch(AnyBatch, Protocol[A]):
    """Actions that a policy chose."""

    act: A


class ModelOutputBatch(ActBatch[A], Protocol[A]):
    """Actions, the model outputs that determine the actions, and the next hidden state."""

    state: Any
    logits: A


class DistributionBatch(ModelOutputBatch[A], Protocol[A]):
    """Actions and the distribution from which the actions were sampled."""

    dist: Distribution


class RecurrentStateBatch(AnyBatch, Protocol[A]):
    """State of a recurrent model."""

    hidden: A
    cell: A
