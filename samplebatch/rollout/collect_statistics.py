"""What a collector reports about one call of `collect`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from samplebatch.batch.sample_batch import SampleBatch


@dataclass(frozen=True)
class SequenceSummaryStats:
    """Mean, standard deviation, maximum and minimum of some numbers.

    Attributes
    ----------
    mean, std, max, min
        Of all numbers; the standard deviation is that of the numbers themselves (divided by n).
    """

    mean: float
    std: float
    max: float
    min: float

    @classmethod
    def from_sequence(cls, numbers: npt.ArrayLike) -> Self | None:
        """Sum up numbers of any shape; None if there are none.

        Examples
        --------
        >>> SequenceSummaryStats.from_sequence([1.0, 3.0])
        SequenceSummaryStats(mean=2.0, std=1.0, max=3.0, min=1.0)
        """
        array = np.asarray(numbers)
        if not array.size:
            return None
        return cls(float(array.mean()), float(array.std()), float(array.max()), float(array.min()))


@dataclass(frozen=True)
class CollectStats:
    """What was collected, and how fast.

    Attributes
    ----------
    n_collected_episodes
        Episodes that ended.
    n_collected_steps
        Steps that were made and kept.
    collect_time
        Seconds that it took.
    collect_speed
        Steps per second.
    returns
        Rewards of each episode that ended, summed from its first step on, even if that was in an earlier call; shape
        (k,), in the order in which they ended.
    lens
        Steps of each of them, shape (k,).
    returns_stat, lens_stat
        These in four numbers each; None if no episode ended.
    batch
        The steps, the ones of an environment after the other; None if they went to a buffer.
    """

    n_collected_episodes: int = 0
    n_collected_steps: int = 0
    collect_time: float = 0.0
    collect_speed: float = 0.0
    returns: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    lens: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    returns_stat: SequenceSummaryStats | None = None
    lens_stat: SequenceSummaryStats | None = None
    batch: SampleBatch | None = None

    @classmethod
    def of(
        cls,
        *,
        steps: int,
        time_s: float,
        returns: npt.NDArray[np.float64],
        lens: npt.NDArray[np.int64],
        batch: SampleBatch | None = None,
    ) -> Self:
        """Work out what follows from what was counted.

        Examples
        --------
        >>> stats = CollectStats.of(steps=6, time_s=2.0, returns=np.array([1.0, 3.0]), lens=np.array([2, 3]))
        >>> stats.collect_speed, stats.returns_stat.mean, stats.lens_stat.max
        (3.0, 2.0, 3.0)
        """
        return cls(
            n_collected_episodes=len(lens),
            n_collected_steps=steps,
            collect_time=time_s,
            collect_speed=steps / time_s if time_s > 0 else 0.0,
            returns=returns,
            lens=lens,
            returns_stat=SequenceSummaryStats.from_sequence(returns),
            lens_stat=SequenceSummaryStats.from_sequence(lens),
            batch=batch,
        )
