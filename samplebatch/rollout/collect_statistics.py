"""Reports of collectors about one call of `collect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pprint import pformat
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.summary import aligned, html_table
from samplebatch.errors import ArgumentError
from samplebatch.names import PolicyID
from samplebatch.rollout.statistics import EpisodeStatistics, PolicyStatistics

_NONE_ENDED = PolicyStatistics(0, np.empty(0), np.empty(0, np.int64))
_HEADINGS = ("", "mean", "std", "min", "max")

BatchT = TypeVar("BatchT", bound=SampleBatch | MultiAgentBatch)


class PrintedAsDict:
    """Printing of a report's fields, those of reports within it included, as a dict."""

    def pprint_asdict(self, exclude_fields: Sequence[str] | None = None, indent: int = 4) -> None:
        """Print the fields as a dict.

        Parameters
        ----------
        exclude_fields
            Names of fields to leave out.
        indent
            Spaces before nested ones.

        Examples
        --------
        >>> SequenceSummaryStats.from_single_value(2).pprint_asdict(exclude_fields=["std"])
        SequenceSummaryStats
        ----------------------------------------
        {'max': 2.0, 'mean': 2.0, 'min': 2.0}
        """
        print(self.pprints_asdict(exclude_fields, indent))

    def pprints_asdict(self, exclude_fields: Sequence[str] | None = None, indent: int = 4) -> str:
        """Return the text that `pprint_asdict` prints."""
        shown = {name: value for name, value in _as_dict(self).items() if name not in (exclude_fields or ())}
        return f"{type(self).__name__}\n{'-' * 40}\n{pformat(shown, indent=indent)}"


def _as_dict(report: Any) -> Any:
    """Turn reports, and mappings of them, into dicts; other values stay, and are not copied."""
    if isinstance(report, PrintedAsDict):
        return {name: _as_dict(value) for name, value in vars(report).items()}
    return {name: _as_dict(value) for name, value in report.items()} if type(report) is dict else report


@dataclass(frozen=True)
class SequenceSummaryStats(PrintedAsDict):
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
    def from_single_value(cls, value: float) -> Self:
        """Make the summary of one number."""
        return cls(float(value), 0.0, float(value), float(value))

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
        if array.size == 1:
            # Most calls that collect few steps end one episode at the most.
            number = float(array.item())
            return cls(number, abs(number - number), number, number)
        return cls(float(array.mean()), float(array.std()), float(array.max()), float(array.min()))


@dataclass(frozen=True, repr=False)
class CollectStats(PrintedAsDict, Generic[BatchT]):
    """Report of one call of `collect`: episodes, steps, speed, returns and the batch.

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
        The steps, stream by stream; None if they went to a buffer, which type checkers do not see.
    policies
        Where there are several agents, the same of each policy, by policy id: its agents' steps, and an entry for each
        of them in each episode that ended. `returns` and `lens` have those of all policies then, one policy after the
        other.
    """

    n_collected_episodes: int = 0
    n_collected_steps: int = 0
    collect_time: float = 0.0
    collect_speed: float = 0.0
    returns: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    lens: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    returns_stat: SequenceSummaryStats | None = None
    lens_stat: SequenceSummaryStats | None = None
    # Only who gave the collector a buffer has to ask whether it is there.
    batch: BatchT | Any = None
    policies: Mapping[PolicyID, CollectStats[Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        text = aligned(self._title(), _HEADINGS, self._rows())
        return "\n".join([text, *([] if self.batch is None else [f"  batch: {self.batch!r}"])])

    def _repr_html_(self) -> str:
        table = html_table(self._title(), _HEADINGS, [[escape(cell) for cell in row] for row in self._rows()])
        return table if self.batch is None else table + self.batch._repr_html_()

    def _title(self) -> str:
        done = f"{self.n_collected_steps} steps, {self.n_collected_episodes} episodes"
        return f"CollectStats({done} in {self.collect_time:.3g} s, {self.collect_speed:.0f} steps/s)"

    def _rows(self) -> list[list[str]]:
        """Return the returns and lengths of episodes as cells, those of each policy after them."""
        parts = {"": self, **{f"{policy} ": stats for policy, stats in self.policies.items()}}
        rows = []
        for prefix, stats in parts.items():
            for name, found in (("returns", stats.returns_stat), ("lens", stats.lens_stat)):
                numbers = (
                    [""] * 4 if found is None else [f"{n:.4g}" for n in (found.mean, found.std, found.min, found.max)]
                )
                rows.append([f"{prefix}{name}", *numbers])
        return rows

    @classmethod
    def from_counts(
        cls,
        *,
        steps: int,
        time_s: float,
        returns: npt.NDArray[np.float64],
        lens: npt.NDArray[np.int64],
        episodes: int | None = None,
        batch: BatchT | None = None,
        policies: Mapping[PolicyID, CollectStats[Any]] | None = None,
    ) -> Self:
        """Make a report from counts.

        Examples
        --------
        >>> stats = CollectStats.from_counts(steps=6, time_s=2.0, returns=np.array([1.0, 3.0]), lens=np.array([2, 3]))
        >>> stats.collect_speed, stats.returns_stat.mean, stats.lens_stat.max
        (3.0, 2.0, 3.0)
        """
        stats = cls.__new__(cls)
        # All at once: a frozen dataclass sets field by field, which loops that collect step by step notice.
        stats.__dict__.update(
            n_collected_episodes=len(lens) if episodes is None else episodes,
            n_collected_steps=steps,
            collect_time=time_s,
            collect_speed=steps / time_s if time_s > 0 else 0.0,
            returns=returns,
            lens=lens,
            returns_stat=SequenceSummaryStats.from_sequence(returns) if len(returns) else None,
            lens_stat=SequenceSummaryStats.from_sequence(lens) if len(lens) else None,
            batch=batch,
            policies=policies or {},
        )
        return stats


def check_amounts(n_step: int | None, n_episode: int | None) -> None:
    """Refuse anything but exactly one positive amount.

    Raises
    ------
    ArgumentError
        If one is no whole number from 0 on, or not exactly one is positive.
    """
    if type(n_step) is int and n_step > 0 and n_episode is None:
        return
    named = {"n_step": n_step, "n_episode": n_episode}
    if sum([whole(name, number) > 0 for name, number in named.items() if number is not None]) != 1:
        raise ArgumentError(
            f"exactly one of n_step and n_episode must be positive, got n_step={n_step} and n_episode={n_episode}"
        )


def report(
    env_steps: int,
    agent_steps: Mapping[PolicyID, int],
    ended: EpisodeStatistics,
    time_s: float,
    batch: MultiAgentBatch | None,
) -> CollectStats[MultiAgentBatch]:
    """Report on steps of several agents.

    Parameters
    ----------
    env_steps, agent_steps
        Environment steps, and the steps of each policy's agents.
    ended
        The episodes that ended with them.
    time_s
        Seconds that they took.
    batch
        The steps; None where they are elsewhere.
    """
    policies = {}
    returns, lens = [np.empty(0)], [np.empty(0, np.int64)]
    for policy_id, steps in agent_steps.items():
        own = ended.policies.get(policy_id, _NONE_ENDED)
        policies[policy_id] = CollectStats[SampleBatch].from_counts(
            steps=steps,
            time_s=time_s,
            returns=own.returns,
            lens=own.lengths,
            episodes=own.episodes,
            batch=None if batch is None else batch.policy_batches.get(policy_id),
        )
        returns.append(own.returns)
        lens.append(own.lengths)
    return CollectStats.from_counts(
        steps=env_steps,
        time_s=time_s,
        returns=np.concatenate(returns),
        lens=np.concatenate(lens),
        episodes=ended.episodes,
        batch=batch,
        policies=policies,
    )
