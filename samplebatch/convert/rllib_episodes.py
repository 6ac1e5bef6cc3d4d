"""RLlib's episodes: `SingleAgentEpisode` and `MultiAgentEpisode` of its new API stack, read and made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.convert.steps import (
    Source,
    arrays_of,
    as_steps,
    flags_of,
    join_episodes,
    make_episode,
    map_leaves,
    observations_of,
    require_columns,
    stack_steps,
)
from samplebatch.errors import ColumnTypeError, require

if TYPE_CHECKING:
    from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

AGENT_ID = "agent_id"
MODULE_ID = "module_id"
_ENV_T = "env_t"

_OWN = frozenset(
    (
        names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS, names.DONES,
        names.INFOS, names.EPS_ID, names.T, names.ENV_ID, names.AGENT_INDEX, names.UNROLL_ID, names.EPS_DONE,
        names.WEIGHTS_VERSION, AGENT_ID, MODULE_ID,
    )
)  # fmt: skip
"""Columns that an episode has in other places than its extra model outputs, or not at all."""


class EpisodeParts(NamedTuple):
    """Parts of an episode of one agent, as lists of steps or arrays; the lookback before its first step is cut."""

    id: str
    observations: Any
    infos: Any
    actions: Any
    rewards: Any
    extras: Mapping[str, Any]
    terminated: bool
    truncated: bool
    t_started: int

    def to_batch(self) -> SampleBatch:
        """Return the steps; arrays are shared, lists are stacked."""
        columns = {
            names.ACTIONS: _stack(self.actions, names.ACTIONS),
            names.REWARDS: _stack(self.rewards, names.REWARDS),
            **{name: _stack(values, name) for name, values in self.extras.items()},
        }
        infos = list(self.infos)[1:]
        if any(infos):
            columns[names.INFOS] = [info or {} for info in infos]
        observations = _stack(self.observations, names.OBS)
        batch = make_episode(0, observations, columns, terminated=self.terminated, truncated=self.truncated)
        batch[names.EPS_ID] = np.full(batch.count, self.id)
        batch[names.T] = np.arange(self.t_started, self.t_started + batch.count)
        return batch


def from_rllib_episodes(
    episodes: Iterable[SingleAgentEpisode] | Iterable[MultiAgentEpisode],
) -> SampleBatch | MultiAgentBatch:
    """Return the steps of RLlib's episodes.

    The id of an episode is `eps_id`; what stands before its first step (its lookback) is left out. Extra model outputs
    are columns of their own names.

    Parameters
    ----------
    episodes
        Episodes of one kind, converted to NumPy or not. A single one that is converted is not copied.

    Returns
    -------
    SampleBatch or MultiAgentBatch
        Of episodes of several agents, a batch for each module, in which `agent_id` and `t`, the environment's time,
        tell the rows. An action whose outcome no agent has seen yet is left out.

    Raises
    ------
    ColumnTypeError
        If there is no episode, one of another kind, or values of a column vary in shape.
    ColumnMismatchError
        If episodes differ in their columns, or steps in how they are nested.

    Examples
    --------
    >>> from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    >>> episode = SingleAgentEpisode(observations=[0.0, 1.0, 2.0], actions=[1, 0], rewards=[0.5, 1.0], terminated=True,
    ...     len_lookback_buffer=0)
    >>> batch = from_rllib_episodes([episode])
    >>> batch["new_obs"].tolist(), batch["terminateds"].tolist()
    ([1.0, 2.0], [False, True])
    """
    given = list(episodes)
    if given and all(hasattr(episode, "agent_episodes") for episode in given):
        return _from_several_agents(given)
    if not given or not all(hasattr(episode, "extra_model_outputs") for episode in given):
        raise ColumnTypeError("episodes of RLlib must be of one kind, and one at least, to be converted")
    return join_episodes([parts_of(episode).to_batch() for episode in given])


def parts_of(episode: Any) -> EpisodeParts:
    """Take an episode of one agent apart."""

    def cut(buffer: Any) -> Any:
        return trim(buffer.data, buffer.lookback)

    return EpisodeParts(
        str(episode.id_),
        cut(episode.observations),
        cut(episode.infos),
        cut(episode.actions),
        cut(episode.rewards),
        {str(name): cut(buffer) for name, buffer in episode.extra_model_outputs.items()},
        bool(episode.is_terminated),
        bool(episode.is_truncated),
        int(episode.t_started),
    )


def trim(data: Any, lookback: int) -> Any:
    """Cut the first rows off a list of steps, or off each array of a tree."""
    return data[lookback:] if isinstance(data, list) else map_leaves(lambda _, leaf: leaf[lookback:], data, "")


def _stack(steps: Any, path: str) -> Any:
    """Stack a list of values, each of which may be a tree; arrays are kept."""
    return stack_steps(steps, path) if isinstance(steps, list) else steps


def _from_several_agents(episodes: list[Any]) -> MultiAgentBatch:
    by_module: dict[str, list[SampleBatch]] = {}
    for episode in episodes:
        for index, (agent, own) in enumerate(sorted(episode.agent_episodes.items(), key=lambda item: str(item[0]))):
            batch = parts_of(own).to_batch()
            if not batch.count:
                continue
            batch[names.EPS_ID] = np.full(batch.count, str(episode.id_))
            batch[AGENT_ID] = np.full(batch.count, str(agent))
            batch[names.AGENT_INDEX] = np.full(batch.count, index)
            batch[names.T] = _env_times(episode, agent)[: batch.count]
            module = own.module_id if own.module_id is not None else episode.module_for(agent)
            by_module.setdefault(str(module), []).append(batch)
    policies = {module: join_episodes(batches) for module, batches in by_module.items()}
    return MultiAgentBatch(policies, sum(map(len, episodes)))


def _env_times(episode: Any, agent: Any) -> npt.NDArray[np.int64]:
    """Return the environment's times at which an agent observed, from the episode's first step on."""
    steps = episode.env_t_to_agent_t[agent]
    data = list(steps.data)[steps.lookback :]
    observed = [i for i, t in enumerate(data) if t != episode.SKIP_ENV_TS_TAG]
    return np.array(observed, np.int64) + np.int64(episode.env_t_started)


# Writing


def to_rllib_episodes(
    source: Source, *, observation_space: Any = None, action_space: Any = None
) -> list[SingleAgentEpisode] | list[MultiAgentEpisode]:
    """Return steps as RLlib's episodes, already converted to NumPy.

    Columns that RLlib has no place for (`action_logp`, `vf_preds`, ...) become extra model outputs; the `state_in` of
    one agent's steps becomes the `state_out` of those before them, which learners of recurrent modules look for.
    Observations are shared where `obs` and `new_obs` are views of the same ones, as `from_rllib_episodes` gives them.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments. A MultiAgentBatch gives episodes of several agents, which are
        called by `agent_id`, or by `agent_index` where there is none; it must have `eps_id` and `t`.
    observation_space, action_space
        The spaces that the episodes are to know; of several agents, by agent.

    Raises
    ------
    ColumnNotFoundError, ColumnTypeError
        If a column is missing, or its rows vary in shape; names it.
    SequenceError
        If steps of an agent's episode are missing.
    EmptyBufferError
        If there are no steps.
    MissingExtraError
        If RLlib is not installed.
    """
    if isinstance(source, MultiAgentBatch):
        return _to_several_agents(source, observation_space, action_space)
    module = require("ray.rllib.env.single_agent_episode", "rllib")
    lookback = require("ray.rllib.env.utils.infinite_lookback_buffer", "rllib").InfiniteLookbackBuffer
    made = []
    for episode in _episodes(source):
        terminated, truncated = (bool(flags[-1]) for flags in flags_of(episode))
        parts = {
            "observations": observations_of(episode),
            "actions": arrays_of(episode, names.ACTIONS),
            "rewards": arrays_of(episode, names.REWARDS),
        }
        made.append(
            module.SingleAgentEpisode(
                _id(episode),
                **{name: lookback(values) for name, values in parts.items()},
                infos=lookback([{}, *_infos(episode)]),
                extra_model_outputs=_model_outputs(episode, lookback),
                terminated=terminated,
                truncated=truncated,
                t_started=int(episode[names.T][0]) if names.T in episode else 0,
                len_lookback_buffer=0,
                observation_space=observation_space,
                action_space=action_space,
            )
        )
    return made


def _model_outputs(episode: SampleBatch, lookback: Any) -> dict[str, Any]:
    """Return the further columns of an episode; of recurrent states those after each step, as RLlib keeps them.

    The state that the first step began with looks back on the episode. That after the last one is not recorded, and
    learners do not look at it: the state before it stands there.
    """
    made = {name: lookback(arrays_of(episode, name)) for name in episode if name not in _OWN and name != names.STATE_IN}
    if names.STATE_IN in episode and names.STATE_OUT not in episode:
        places = np.append(np.arange(episode.count), episode.count - 1)
        made[names.STATE_OUT] = lookback(_take(arrays_of(episode, names.STATE_IN), places), lookback=1)
    return made


def _take(values: Any, places: Any) -> Any:
    if isinstance(values, dict):
        return {name: _take(value, places) for name, value in values.items()}
    return values[places]


def _episodes(source: Source) -> Iterator[SampleBatch]:
    steps = as_steps(source)
    require_columns(steps.batch, names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS)
    return steps.episodes()


def _id(episode: SampleBatch) -> str | None:
    return str(episode[names.EPS_ID][0]) if names.EPS_ID in episode else None


def _infos(episode: SampleBatch) -> list[Any]:
    if names.INFOS not in episode:
        return [{} for _ in range(episode.count)]
    # Infos alone count no steps.
    return [row[names.INFOS] or {} for row in episode.select(names.INFOS, names.REWARDS).rows()]


class _AgentSteps(NamedTuple):
    """The steps of an agent in an episode, row by row."""

    agent: Any
    module: str
    rows: list[dict[str, Any]]
    times: list[int]
    terminated: bool
    truncated: bool


def _to_several_agents(source: MultiAgentBatch, observation_space: Any, action_space: Any) -> list[Any]:
    module = require("ray.rllib.env.multi_agent_episode", "rllib")
    by_episode: dict[Any, list[_AgentSteps]] = {}
    for policy, batch in source.policy_batches.items():
        require_columns(batch, names.EPS_ID, names.T, names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS)
        for part in _trajectories(batch):
            own = _agent_steps(policy, part)
            by_episode.setdefault(part[names.EPS_ID][0], []).append(own)
    return [
        _episode_of_agents(module.MultiAgentEpisode, str(episode), agents, observation_space, action_space)
        for episode, agents in by_episode.items()
    ]


def _trajectories(batch: SampleBatch) -> Iterator[SampleBatch]:
    """Yield the steps of each agent in each episode; the environment's time leaves out those in which it waits."""
    if names.AGENT_INDEX not in batch and AGENT_ID in batch:
        batch = batch.copy(shallow=True)
        batch[names.AGENT_INDEX] = np.unique(np.asarray(batch[AGENT_ID]), return_inverse=True)[1].reshape(-1)
    order = np.argsort(np.asarray(batch[names.T]), kind="stable")
    return as_steps(batch.take(order).rename({names.T: _ENV_T})).episodes()


def _agent_steps(policy: str, part: SampleBatch) -> _AgentSteps:
    terminated, truncated = (bool(flags[-1]) for flags in flags_of(part))
    rows = list(part.rows())
    first = rows[0]
    agent = str(first[AGENT_ID]) if AGENT_ID in first else int(first.get(names.AGENT_INDEX, 0))
    return _AgentSteps(agent, policy, rows, np.asarray(part[_ENV_T]).tolist(), terminated, truncated)


def _episode_of_agents(
    cls: Any, name: str, agents: list[_AgentSteps], observation_space: Any, action_space: Any
) -> MultiAgentEpisode:
    """Lay out the steps of all agents by the environment's time, as RLlib's constructor takes them."""
    start = min(own.times[0] for own in agents)
    length = max(own.times[-1] for own in agents) - start + 1
    columns: dict[str, list[dict[Any, Any]]] = {
        key: [{} for _ in range(length + 1)] for key in ("observations", "infos", "actions", "rewards", "extras")
    }
    for own in agents:
        places = [t - start for t in own.times]
        # The observation after an agent's last step is that of the end, for RLlib takes any before as its termination.
        after = [*places[1:], places[-1] + 1 if own.terminated or own.truncated else length]
        for row, place, following in zip(own.rows, places, after, strict=True):
            columns["observations"][place][own.agent] = row[names.OBS]
            columns["observations"][following][own.agent] = row[names.NEXT_OBS]
            columns["infos"][following][own.agent] = row.get(names.INFOS) or {}
            columns["actions"][place][own.agent] = row[names.ACTIONS]
            columns["rewards"][place][own.agent] = row[names.REWARDS]
            columns["extras"][place][own.agent] = {key: row[key] for key in row if key not in _OWN and key != _ENV_T}
    terminateds: dict[Any, bool] = {own.agent: own.terminated for own in agents}
    truncateds: dict[Any, bool] = {own.agent: own.truncated for own in agents}
    terminateds["__all__"] = all(terminateds.values())
    truncateds["__all__"] = not terminateds["__all__"] and all(own.terminated or own.truncated for own in agents)
    made: MultiAgentEpisode = cls(
        name,
        observations=columns["observations"],
        infos=columns["infos"],
        actions=columns["actions"][:-1],
        rewards=columns["rewards"][:-1],
        extra_model_outputs=columns["extras"][:-1],
        terminateds=terminateds,
        truncateds=truncateds,
        env_t_started=start,
        len_lookback_buffer=0,
        agent_module_ids={own.agent: own.module for own in agents},
        observation_space=observation_space,
        action_space=action_space,
    )
    return made.to_numpy()
