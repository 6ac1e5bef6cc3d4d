"""Statistics of the episodes in batches and fragments, and the result of `collect`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pprint import pformat
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import EpisodeEnds, by_stream, episode_ends, run_starts
from samplebatch.batch.flags import MissingAttribute
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.summary import aligned, html_table
from samplebatch.errors import ArgumentError
from samplebatch.names import PolicyID, for_html

_NEEDED = (names.EPS_ID, names.T, names.AGENT_INDEX, names.REWARDS)


@dataclass(frozen=True)
class PolicyStatistics:
    """Statistics of one policy's agents in completed episodes, ordered by each agent's first step in the batch.

    Attributes
    ----------
    episodes
        Number of completed episodes in which an agent of the policy acted.
    returns
        Sum of rewards per agent and episode, shape (k,); or shape (k, m) if each reward has shape (m,).
    lengths
        Number of steps per agent and episode, shape (k,).
    """

    episodes: int
    returns: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]

    @property
    def mean_return(self) -> float:
        """Mean of all values in `returns`; NaN if no episode ended."""
        return float(self.returns.mean()) if self.returns.size else float("nan")

    @property
    def mean_length(self) -> float:
        """Mean of all values in `lengths`; NaN if no episode ended."""
        return float(self.lengths.mean()) if self.lengths.size else float("nan")


@dataclass(frozen=True)
class EpisodeStatistics:
    """Statistics of the episodes in a batch.

    Attributes
    ----------
    episodes
        Number of episodes that ended within the batch.
    unfinished
        Number of episodes that did not end within the batch.
    policies
        Statistics of each policy's agents in the completed episodes.
    """

    episodes: int
    unfinished: int
    policies: dict[PolicyID, PolicyStatistics]


def episode_statistics(batch: MultiAgentBatch | SampleBatch) -> EpisodeStatistics | None:
    """Compute statistics of the episodes in a batch.

    An episode has ended if `eps_done` is true in one of its steps. Without the column `eps_done`, an episode has ended
    if every agent that acted in its last step was terminated or truncated. Unfinished episodes are counted, but
    excluded from returns and lengths.

    Parameters
    ----------
    batch
        A batch with the columns `eps_id`, `t`, `agent_index`, `rewards`, and either `terminateds` and `truncateds` or
        `dones`. Rows may be in any order.

    Returns
    -------
    EpisodeStatistics or None
        Statistics; None if a policy's batch lacks a required column.

    Examples
    --------
    >>> steps = SampleBatch(
    ...     eps_id=[7, 7, 7, 8],
    ...     t=[0, 1, 2, 0],
    ...     agent_index=[0, 0, 0, 0],
    ...     rewards=[1.0, 2.0, 3.0, 9.0],
    ...     dones=[False, False, True, False],
    ... )
    >>> statistics = episode_statistics(steps)
    >>> (
    ...     statistics.episodes,
    ...     statistics.unfinished,
    ...     statistics.policies["default_policy"].mean_return,
    ... )
    (1, 1, 6.0)
    """
    policies = policies_of(batch)
    ends = _ends_of(policies)
    if ends is None:
        return None
    finished = ends.ids[ends.finished]
    return EpisodeStatistics(
        len(finished),
        len(ends.ids) - len(finished),
        {policy: _of_policy(steps, finished) for policy, steps in policies.items()},
    )


def policies_of(fragment: SampleBatch | MultiAgentBatch) -> dict[PolicyID, SampleBatch]:
    """Return the non-empty batches in a fragment by policy id."""
    return {policy: steps for policy, steps in fragment.as_multi_agent().policy_batches.items() if steps.count}


def finished_episodes(batch: MultiAgentBatch | SampleBatch) -> npt.NDArray[Any]:
    """Return the ids of the episodes that ended within a batch; see `episode_statistics`.

    The result is empty if a required column is missing.
    """
    ends = episode_ends(policies_of(batch))
    return np.empty(0, np.int64) if ends is None else ends.ids[ends.finished]


def _ends_of(policies: Mapping[PolicyID, SampleBatch]) -> EpisodeEnds | None:
    """Find completed episodes; return None if a batch lacks a required column."""
    if not all(name in steps for steps in policies.values() for name in _NEEDED):
        return None
    return episode_ends(policies)


def _of_policy(steps: SampleBatch, finished: npt.NDArray[Any]) -> PolicyStatistics:
    rows = np.flatnonzero(np.isin(np.asarray(steps[names.EPS_ID]), finished))
    if not len(rows):
        rewards = np.asarray(steps[names.REWARDS])
        return PolicyStatistics(0, np.empty((0, *rewards.shape[1:])), np.empty(0, np.int64))
    trajectories = _sum_up(steps, rows)
    order = trajectories.first.argsort()
    return PolicyStatistics(
        len(np.unique(trajectories.eps_id)), trajectories.returns[order], trajectories.lengths[order]
    )


class _Trajectories(NamedTuple):
    """Episode, agent, first row, sum of rewards and number of steps of k trajectories, shape (k,) each."""

    eps_id: npt.NDArray[Any]
    agent: npt.NDArray[Any]
    first: npt.NDArray[np.intp]
    returns: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]


def _sum_up(steps: SampleBatch, rows: npt.NDArray[np.intp]) -> _Trajectories:
    eps_id, agent, rewards = (np.asarray(steps[name]) for name in (names.EPS_ID, names.AGENT_INDEX, names.REWARDS))
    rows = rows[by_stream(eps_id[rows], agent[rows])]
    trajectories = _sum_runs(eps_id[rows], agent[rows], rewards[rows])
    return trajectories._replace(first=rows[trajectories.first])


def _sum_runs(eps_id: npt.NDArray[Any], agent: npt.NDArray[Any], rewards: npt.NDArray[Any]) -> _Trajectories:
    """Sum rewards and count steps per run of rows with one episode and agent; requires at least one row."""
    starts = run_starts(eps_id, agent)
    returns = np.add.reduceat(rewards, starts, axis=0, dtype=np.float64)
    return _Trajectories(eps_id[starts], agent[starts], starts, returns, np.diff(starts, append=len(rewards)))


class RunningStatistics:
    """Statistics of episodes that extend over several fragments.

    `episode_statistics` reads a single batch. The class accumulates statistics over fragments, so that returns and
    lengths cover entire episodes. The fragments of an episode must be added in time order.

    >>> running = RunningStatistics()
    >>> for t, rewards, done in (([0, 1], [1.0, 2.0], [False, False]), ([2], [4.0], [True])):
    ...     steps = SampleBatch(
    ...         eps_id=[7] * len(t), t=t, agent_index=[0] * len(t), rewards=rewards, dones=done
    ...     )
    ...     running.add(steps).episodes
    0
    1
    >>> running.statistics().policies["default_policy"].mean_return
    7.0
    """

    def __init__(self) -> None:
        self.episodes = 0
        self._ended: dict[PolicyID, dict[str, Any]] = {}
        self._open: dict[Any, dict[tuple[PolicyID, Any], list[Any]]] = {}
        self._newest: dict[int, Any] = {}
        """Newest unfinished episode of each environment, for `forget_cut_off`."""

    @property
    def unfinished(self) -> int:
        """Number of unfinished episodes."""
        return len(self._open)

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> EpisodeStatistics:
        """Add a fragment and return the statistics of the episodes that end in the fragment.

        A fragment that lacks `eps_id`, `t`, `agent_index`, `rewards` or episode-end flags is ignored.
        """
        ended = self.advance(fragment)
        self.include(ended)
        return ended

    def advance(self, fragment: SampleBatch | MultiAgentBatch) -> EpisodeStatistics:
        """Update unfinished episodes with a fragment; return statistics of the episodes that end in the fragment."""
        policies = policies_of(fragment)
        ends = _ends_of(policies)
        if ends is None:
            return EpisodeStatistics(0, len(self._open), {})
        for policy, steps in policies.items():
            self._open_runs(policy, _sum_up(steps, np.arange(len(steps))))
        return self.end(ends.ids[ends.finished].tolist())

    def add_rows(
        self, policy: PolicyID, eps_id: npt.NDArray[Any], agent: npt.NDArray[Any], rewards: npt.NDArray[Any]
    ) -> None:
        """Add steps of a policy's agents, grouped by agent."""
        self._open_runs(policy, _sum_runs(eps_id, agent, rewards))

    def end(self, eps_ids: Iterable[Any]) -> EpisodeStatistics:
        """Remove finished episodes and return their statistics."""
        ended: dict[PolicyID, dict[str, Any]] = {}
        episodes = 0
        for eps_id in eps_ids:
            episodes += 1
            trajectories = self._open.pop(eps_id)
            counted = set()
            for (policy, _), (total, length) in trajectories.items():
                of_policy = ended.setdefault(policy, {"episodes": 0, "returns": [], "lengths": []})
                of_policy["episodes"] += policy not in counted
                counted.add(policy)
                of_policy["returns"].append(total)
                of_policy["lengths"].append(length)
        return EpisodeStatistics(episodes, len(self._open), _by_policy(ended))

    def include(self, finished: EpisodeStatistics) -> None:
        """Count finished episodes."""
        self.episodes += finished.episodes
        for policy, counts in finished.policies.items():
            ended = self._ended.setdefault(policy, {"episodes": 0, "returns": [], "lengths": []})
            ended["episodes"] += counts.episodes
            ended["returns"] += list(counts.returns)
            ended["lengths"] += counts.lengths.tolist()

    def statistics(self) -> EpisodeStatistics:
        """Return the statistics of all finished episodes, in order of completion."""
        return EpisodeStatistics(self.episodes, len(self._open), _by_policy(self._ended))

    def clear(self) -> None:
        """Discard unfinished episodes."""
        self._open, self._newest = {}, {}

    def forget_cut_off(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Discard each environment's previous unfinished episode if a fragment contains a newer unfinished episode.

        All fragments must belong to one run, in which environments have distinct `env_id`s.
        """
        newest: dict[int, Any] = {}
        for steps in policies_of(fragment).values():
            if names.EPS_ID not in steps or names.ENV_ID not in steps:
                return
            env_id, eps_id = (np.asarray(steps[name]) for name in (names.ENV_ID, names.EPS_ID))
            starts = run_starts(env_id, eps_id)
            pairs = zip(env_id[starts].tolist(), eps_id[starts].tolist(), strict=True)
            newest |= {env: episode for env, episode in pairs if episode in self._open}
        for env, episode in newest.items():
            before = self._newest.get(env)
            if before != episode:
                self._open.pop(before, None)
        self._newest |= newest

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of finished and unfinished episodes, for `load_state_dict`."""
        return copy.deepcopy({name.strip("_"): value for name, value in vars(self).items()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the statistics from `state_dict`."""
        for name in ("episodes", "_ended", "_open", "_newest"):
            setattr(self, name, copy.deepcopy(state[name.strip("_")]))

    def _open_runs(self, policy: PolicyID, trajectories: _Trajectories) -> None:
        runs = zip(
            trajectories.eps_id.tolist(),
            trajectories.agent.tolist(),
            trajectories.returns,
            trajectories.lengths.tolist(),
            strict=True,
        )
        for episode, agent, total, length in runs:
            before = self._open.setdefault(episode, {}).setdefault((policy, agent), [0.0, 0])
            before[0] = before[0] + total
            before[1] += length


def _by_policy(ended: Mapping[PolicyID, Mapping[str, Any]]) -> dict[PolicyID, PolicyStatistics]:
    statistics = {}
    for policy, values in ended.items():
        returns, lengths = np.array(values["returns"], np.float64), np.array(values["lengths"], int)
        statistics[policy] = PolicyStatistics(values["episodes"], returns, lengths)
    return statistics


_NONE_ENDED = PolicyStatistics(0, np.empty(0), np.empty(0, np.int64))
_HEADINGS = ("", "mean", "std", "min", "max")

BatchT = TypeVar("BatchT", bound=SampleBatch | MultiAgentBatch)


class PrintedAsDict:
    """Base class of dataclasses that can be printed as nested dicts."""

    def pprint_asdict(self, exclude_fields: Sequence[str] | None = None, indent: int = 4) -> None:
        """Print the fields as a dict.

        Parameters
        ----------
        exclude_fields
            Names of fields to omit.
        indent
            Number of spaces by which nested fields are indented.

        Examples
        --------
        >>> SequenceSummaryStats.from_single_value(2).pprint_asdict(exclude_fields=["std"])
        SequenceSummaryStats
        ----------------------------------------
        {'max': 2.0, 'mean': 2.0, 'min': 2.0}
        """
        print(self.pprints_asdict(exclude_fields, indent))

    def pprints_asdict(self, exclude_fields: Sequence[str] | None = None, indent: int = 4) -> str:
        """Return the string that `pprint_asdict` prints."""
        fields = {name: value for name, value in _as_dict(self).items() if name not in (exclude_fields or ())}
        return f"{type(self).__name__}\n{'-' * 40}\n{pformat(fields, indent=indent)}"


def _as_dict(report: Any) -> Any:
    if isinstance(report, PrintedAsDict):
        return {name: _as_dict(value) for name, value in vars(report).items()}
    return {name: _as_dict(value) for name, value in report.items()} if type(report) is dict else report


@dataclass(frozen=True)
class SequenceSummaryStats(PrintedAsDict):
    """Mean, standard deviation, maximum and minimum of a sequence of numbers.

    Attributes
    ----------
    mean, std, max, min
        Statistics of all numbers; `std` is the population standard deviation (divisor n).
    """

    mean: float
    std: float
    max: float
    min: float

    @classmethod
    def from_single_value(cls, value: float) -> Self:
        """Return the summary of a single number, whose standard deviation is 0."""
        return cls(float(value), 0.0, float(value), float(value))

    @classmethod
    def from_sequence(cls, numbers: npt.ArrayLike) -> Self | None:
        """Summarize an array of any shape; return None if it is empty.

        Examples
        --------
        >>> SequenceSummaryStats.from_sequence([1.0, 3.0])
        SequenceSummaryStats(mean=2.0, std=1.0, max=3.0, min=1.0)
        """
        array = np.asarray(numbers)
        if not array.size:
            return None
        if array.size == 1:
            # Most short calls end at most one episode.
            number = float(array.item())
            return cls(number, abs(number - number), number, number)
        return cls(float(array.mean()), float(array.std()), float(array.max()), float(array.min()))


_STEPS = "stats.batch has the steps of a collector without a buffer, collector.buffer has them otherwise"
_ELSEWHERE = {
    **dict.fromkeys(("obs", "act", "actions", "rew", "rewards", "buffer", "data"), _STEPS),
    **dict.fromkeys(("rews", "mean_reward", "reward"), "stats.returns has the sum of rewards of each episode"),
}
"""Attributes of reports in other libraries, and what has their place here."""


@dataclass(frozen=True, repr=False)
class CollectStats(PrintedAsDict, Generic[BatchT]):
    """Result of one call to `collect`: numbers of episodes and steps, speed, returns, lengths and the batch.

    Attributes
    ----------
    n_collected_episodes
        Number of finished episodes.
    n_collected_steps
        Number of stored steps.
    collect_time
        Duration of the call in seconds.
    collect_speed
        Number of stored steps per second.
    returns
        Sum of rewards of each finished episode, shape (k,), in order of episode ends. The sum for an episode includes
        rewards of steps from earlier calls to `collect`.
    lens
        Number of steps of each finished episode, shape (k,).
    returns_stat, lens_stat
        Summary statistics of `returns` and `lens`; None if no episode ended.
    batch
        Collected steps in stream order; None if the steps are in a buffer, although the static type omits None.
    policies
        With several agents, `CollectStats` by policy id, which contain the number of steps of the policy's agents, and
        one return and length per agent and finished episode. With several agents, `returns` and `lens` concatenate the
        values of all policies.
    """

    n_collected_episodes: int = 0
    n_collected_steps: int = 0
    collect_time: float = 0.0
    collect_speed: float = 0.0
    returns: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    lens: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    returns_stat: SequenceSummaryStats | None = None
    lens_stat: SequenceSummaryStats | None = None
    # The type omits None, because only a collector with a buffer returns None.
    batch: BatchT | Any = None
    policies: Mapping[PolicyID, CollectStats[Any]] = field(default_factory=dict)
    vars().update({name: MissingAttribute(name, way_out) for name, way_out in _ELSEWHERE.items()})

    def __getitem__(self, key: object) -> Any:
        fields_of_report = ", ".join(map(repr, self.__dataclass_fields__))
        raise ArgumentError(f"a report has attributes, got the item {key!r}; there are {fields_of_report}")

    def __repr__(self) -> str:
        text = aligned(self._title(), _HEADINGS, self._rows())
        return "\n".join([text, *([] if self.batch is None else [f"  batch: {self.batch!r}"])])

    def _repr_html_(self) -> str:
        table = html_table(self._title(), _HEADINGS, [[for_html(cell) for cell in row] for row in self._rows()])
        return table if self.batch is None else table + self.batch._repr_html_()

    def _title(self) -> str:
        done = f"{self.n_collected_steps} steps, {self.n_collected_episodes} episodes"
        return f"CollectStats({done} in {self.collect_time:.3g} s, {self.collect_speed:.0f} steps/s)"

    def _rows(self) -> list[list[str]]:
        parts = {"": self, **{f"{policy} ": stats for policy, stats in self.policies.items()}}
        rows = []
        for prefix, stats in parts.items():
            for name, summary in (("returns", stats.returns_stat), ("lens", stats.lens_stat)):
                numbers = (
                    [""] * 4
                    if summary is None
                    else [f"{n:.4g}" for n in (summary.mean, summary.std, summary.min, summary.max)]
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
        """Create a report from counts.

        Examples
        --------
        >>> stats = CollectStats.from_counts(
        ...     steps=6, time_s=2.0, returns=np.array([1.0, 3.0]), lens=np.array([2, 3])
        ... )
        >>> stats.collect_speed, stats.returns_stat.mean, stats.lens_stat.max
        (3.0, 2.0, 3.0)
        """
        stats = cls.__new__(cls)
        # Set all fields at once: field by field, as frozen dataclasses do, is slow in loops of single steps.
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


def report(
    env_steps: int,
    agent_steps: Mapping[PolicyID, int],
    ended: EpisodeStatistics,
    time_s: float,
    batch: MultiAgentBatch | None,
) -> CollectStats[MultiAgentBatch]:
    """Create the `CollectStats` of a multi-agent collection."""
    policies = {}
    returns, lens = [np.empty(0)], [np.empty(0, np.int64)]
    for policy_id, steps in agent_steps.items():
        policy_ended = ended.policies.get(policy_id, _NONE_ENDED)
        policies[policy_id] = CollectStats[SampleBatch].from_counts(
            steps=steps,
            time_s=time_s,
            returns=policy_ended.returns,
            lens=policy_ended.lengths,
            episodes=policy_ended.episodes,
            batch=None if batch is None else batch.policy_batches.get(policy_id),
        )
        returns.append(policy_ended.returns)
        lens.append(policy_ended.lengths)
    return CollectStats.from_counts(
        steps=env_steps,
        time_s=time_s,
        returns=np.concatenate(returns),
        lens=np.concatenate(lens),
        episodes=ended.episodes,
        batch=batch,
        policies=policies,
    )
