"""Independent learners: one algorithm per policy, which learns from the steps of the policy's agents (Tan, ICML 1993).

Several agents may share a policy; `policy_mapping` of the collector assigns agents to policies. Agents that take turns
in one environment, as in Tianshou's `PettingZooEnv`, share a buffer: the column `obs.agent_id` contains the acting
agent, and each reward is an array with one number per agent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import to_numpy
from samplebatch.batch.nested.node import values_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError, PolicyNotFoundError, PolicySpecError, near_names
from samplebatch.learn.algorithm import (
    Algorithm,
    OffPolicyAlgorithm,
    OnPolicyAlgorithm,
    TrainingStats,
    require_source,
    require_steps,
)
from samplebatch.learn.networks import type_name
from samplebatch.learn.policy import Policy, policy_within_training_step, torch_train_mode
from samplebatch.learn.trainer import OffPolicyTrainer, OffPolicyTrainerParams, OnPolicyTrainer, OnPolicyTrainerParams
from samplebatch.names import RETURNS, PolicyID, label_policies

AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm[Any])
_STEP = ("obs", "act", "rew", "terminated", "truncated", "obs_next")
_AGENT = "agent_id"
"""Part of an observation that has the agent that acts."""


class MultiAgentPolicy(Mapping[PolicyID, Policy]):
    """Policies by id, for collectors and workers with several agents; trainers use the policies as one policy.

    For agents that take turns, the observations of a batch contain `agent_id`. A call with such a batch returns `act`
    with one action per row; the policy whose id equals the row's `agent_id` selects the action.

    Raises
    ------
    ArgumentError
        If `policies` is empty.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> from samplebatch.learn import DiscreteQLearningPolicy
    >>> def first_or_last(number):
    ...     model = nn.Linear(1, 3)
    ...     nn.init.zeros_(model.weight)
    ...     model.bias.data[:] = nn.functional.one_hot(torch.tensor(number), 3)
    ...     return DiscreteQLearningPolicy(model=model, action_space=spaces.Discrete(3))
    >>> import torch
    >>> policies = MultiAgentPolicy({"x": first_or_last(0), "o": first_or_last(2)})
    >>> policies(Batch(obs=Batch(agent_id=np.array(["o", "x"]), obs=np.zeros((2, 1))))).act
    array([2, 0])
    """

    def __init__(self, policies: Mapping[PolicyID, Policy]) -> None:
        if not policies:
            raise ArgumentError("policies must have at least one policy, got none")
        self._policies = dict(policies)

    def __getitem__(self, policy_id: PolicyID) -> Policy:
        return self._policies[policy_id]

    def __iter__(self) -> Iterator[PolicyID]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def __call__(self, batch: Batch, state: Any = None) -> Batch:
        """Return, as `act`, the actions of agents that take turns; `agent_id` in the observations selects the policy.

        Raises
        ------
        ArgumentError
            If observations have no `agent_id`.
        PolicyNotFoundError
            If an agent has no policy.
        PolicySpecError
            If a policy is recurrent: its state would be lost, because steps of other agents do not contain the state.
        """
        acts: npt.NDArray[Any] | None = None
        for policy_id, rows in _turns(batch, self._policies).items():
            decision = self._policies[policy_id](_own_rows(batch, rows))
            if decision.get("state") is not None and len(decision.state):
                raise PolicySpecError(
                    f"policies of agents that take turns must have no state, got a state of {policy_id!r}"
                )
            actions = np.asarray(to_numpy(decision.act))
            if acts is None:
                acts = np.zeros((len(batch.obs.agent_id), *actions.shape[1:]), actions.dtype)
            acts[rows] = actions
        return Batch(act=acts)

    def add_exploration_noise(self, act: npt.NDArray[Any], batch: Batch) -> npt.NDArray[Any]:
        """Add the exploration noise of each agent's policy to the agent's action; `act` is modified in place."""
        for policy_id, rows in _turns(batch, self._policies).items():
            policy = self._policies[policy_id]
            act[rows] = policy.add_exploration_noise(act[rows], _own_rows(batch, rows))
        return act

    @property
    def is_within_training_step(self) -> bool:
        """Whether any policy is within a training step; assignment sets the flag of all policies."""
        return any(policy.is_within_training_step for policy in self._policies.values())

    @is_within_training_step.setter
    def is_within_training_step(self, enabled: bool) -> None:
        for policy in self._policies.values():
            policy.is_within_training_step = enabled

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the exploration state of each policy, keyed by the policy's label."""
        labels = label_policies(self._policies)
        return {
            labels[policy_id]: policy.get_exploration_state()
            for policy_id, policy in self._policies.items()
            if isinstance(policy, Policy)
        }

    def set_exploration_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_exploration_state`."""
        for policy_id, label in label_policies(self._policies).items():
            if label in state:
                self._policies[policy_id].set_exploration_state(state[label])

    def state_dict(self) -> dict[PolicyID, dict[str, Any]]:
        """Return the weights of each policy, for `RolloutWorkers.publish`."""
        return {policy_id: policy.state_dict() for policy_id, policy in self._policies.items()}

    def load_state_dict(self, state: Mapping[PolicyID, Mapping[str, Any]]) -> None:
        """Load weights from `state_dict`.

        Raises
        ------
        PolicyNotFoundError
            If the weights are for an unknown policy.
        """
        for policy_id, weights in state.items():
            if policy_id not in self._policies:
                raise PolicyNotFoundError(f"no policy {policy_id!r}; {near_names(policy_id, self._policies)}")
            self._policies[policy_id].load_state_dict(weights)


class MultiAgentTrainingStats(TrainingStats):
    """Statistics of an update of several policies, by policy id."""

    def __init__(self, by_policy: Mapping[PolicyID, TrainingStats]) -> None:
        super().__init__(
            train_time=sum(stats.train_time for stats in by_policy.values()),
            gradient_steps=sum(getattr(stats, "gradient_steps", 0) for stats in by_policy.values()),
        )
        self.by_policy = dict(by_policy)

    def get_loss_stats_dict(self) -> dict[str, float]:
        """Return the metrics of all policies, keyed by names such as `walker/loss`."""
        labels = label_policies(self.by_policy)
        return {
            f"{labels[policy_id]}/{name}": value
            for policy_id, stats in self.by_policy.items()
            for name, value in stats.get_loss_stats_dict().items()
        }


class _Independent(Algorithm[Any], Generic[AlgorithmT]):
    """One algorithm per policy."""

    _policy_class = MultiAgentPolicy

    policy: MultiAgentPolicy

    def __init__(self, algorithms: Mapping[PolicyID, AlgorithmT] | Sequence[AlgorithmT], env: Any = None) -> None:
        if not isinstance(algorithms, Mapping):
            agents = getattr(env, "agents", None)
            if not agents or len(agents) != len(algorithms):
                raise ArgumentError(
                    "env must have one agent per algorithm, for a list of algorithms, got "
                    + (f"{len(agents)} agents and {len(algorithms)} algorithms" if agents else type_name(env))
                    + "; pass algorithms by policy id instead, as {policy_id: algorithm}"
                )
            algorithms = dict(zip(agents, algorithms, strict=True))
        policies = {policy_id: algorithm.policy for policy_id, algorithm in algorithms.items()}
        super().__init__(policy=MultiAgentPolicy(policies))
        self._labels = label_policies(algorithms)
        self.algorithms = nn.ModuleDict(
            {self._labels[policy_id]: algorithm for policy_id, algorithm in algorithms.items()}
        )

    @property
    def allow_nonfinite(self) -> bool:
        """Whether updates of all algorithms continue after a NaN or infinite loss."""
        return all(getattr(algorithm, "allow_nonfinite", True) for algorithm in self.algorithms.values())

    @allow_nonfinite.setter
    def allow_nonfinite(self, allow: bool) -> None:
        # The base constructor sets the property before there are algorithms, which then keep their own settings.
        for algorithm in vars(self)["_modules"].get("algorithms", {}).values():
            algorithm.allow_nonfinite = allow

    def get_algorithm(self, policy_id: PolicyID) -> Any:
        """Return the algorithm of a policy.

        Raises
        ------
        PolicyNotFoundError
            If the policy is unknown.
        """
        if policy_id not in self._labels:
            raise PolicyNotFoundError(f"no policy {policy_id!r}; {near_names(policy_id, self._labels)}")
        return self.algorithms[self._labels[policy_id]]

    def _own_rewards(self, rewards: npt.NDArray[Any], policy_id: PolicyID) -> npt.NDArray[Any]:
        """Return the rewards of one agent, shape (n,), from rows with a reward for each agent."""
        if rewards.ndim != 2 or rewards.shape[1] != len(self._labels):
            raise ArgumentError(
                f"column 'rew' must have a number for each of {len(self._labels)} agents, got rows of shape "
                f"{rewards.shape[1:]}"
            )
        return rewards[:, list(self._labels).index(policy_id)]

    def _update_each(
        self, parts: Mapping[PolicyID, Any], update: Callable[[Any, Any], TrainingStats]
    ) -> MultiAgentTrainingStats:
        nonempty = {policy_id: (self.get_algorithm(policy_id), rows) for policy_id, rows in parts.items() if len(rows)}
        require_steps(len(nonempty))
        stats = {policy_id: update(algorithm, rows) for policy_id, (algorithm, rows) in nonempty.items()}
        self.updates += 1
        return MultiAgentTrainingStats(stats)


class MultiAgentOffPolicyAlgorithm(_Independent[OffPolicyAlgorithm[Any]]):
    """Independent off-policy learners: each policy learns from samples of its own steps in a buffer.

    With a `ReplayBuffer` of agents that take turns, each policy learns from sampled rows in which its agent acts, and
    only from the rewards of this agent. The n steps of an n-step target are consecutive turns, including the turns of
    other agents. Priorities are not updated.

    Parameters
    ----------
    algorithms
        Algorithms by policy id; agents that share a policy also share the algorithm. The attribute `policy` contains
        the policies as a `MultiAgentPolicy`, for collectors, workers and trainers. Alternatively, as in Tianshou, a
        list in the order of `env.agents`. The list may also contain algorithms of Tianshou that learn from single
        steps.
    env
        Environment whose `agents` are the policy ids for a list of algorithms; unused if `algorithms` is a mapping.

    Raises
    ------
    ArgumentError
        If the length of a list of algorithms differs from the number of `env.agents`.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> from samplebatch.learn import DQN, AdamOptimizerFactory, DiscreteQLearningPolicy
    >>> learners = {}
    >>> for role, width in {"adversary": 16, "agent": 14}.items():
    ...     policy = DiscreteQLearningPolicy(
    ...         model=nn.Linear(width, 5), action_space=spaces.Discrete(5)
    ...     )
    ...     learners[role] = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3))
    >>> algorithm = MultiAgentOffPolicyAlgorithm(learners)
    >>> from samplebatch import MultiAgentCollector
    >>> buffer = MultiAgentReplayBuffer(1000)
    >>> with MultiAgentCollector(algorithm.policy, "mpe2/simple_tag_v3", buffer) as collector:
    ...     collector.collect(n_step=50).n_collected_steps
    50
    >>> list(algorithm.update(buffer, sample_size=32).get_loss_stats_dict())
    ['adversary/loss', 'agent/loss']
    """

    def create_trainer(self, params: OffPolicyTrainerParams) -> OffPolicyTrainer:
        """Create a trainer of the algorithms."""
        return OffPolicyTrainer(self, params)

    def update(
        self, buffer: MultiAgentReplayBuffer | MultiAgentBatch | ReplayBuffer, sample_size: int | None = None
    ) -> MultiAgentTrainingStats:
        """Update each policy with samples of its rows in a buffer, or with all of its rows in a train batch.

        Parameters
        ----------
        buffer, sample_size
            The buffer or batch, and the number of rows per policy (see `ReplayBuffer.sample`), or None for a batch. For
            a `ReplayBuffer` of agents that take turns, `sample_size` is the number of rows of all agents together.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        PolicyNotFoundError
            If there are steps of a policy without an algorithm.
        ArgumentError
            As in `OffPolicyAlgorithm.update`; if `buffer` is not a multi-agent buffer or batch; or if steps of a
            `ReplayBuffer` have no `obs.agent_id`, or the number of rewards per step differs from the number of agents.
        """
        if isinstance(buffer, ReplayBuffer):
            samples = {policy_id: self._sample_turns(buffer, sample_size, policy_id) for policy_id in self._labels}
            return self._update_each(samples, lambda algorithm, rows: rows.update(algorithm))
        parts = buffer.policy_batches if isinstance(buffer, MultiAgentBatch) else _buffers_of(buffer, sample_size)
        return self._update_each(parts, lambda algorithm, rows: algorithm.update(rows, sample_size))

    def _sample_turns(self, buffer: ReplayBuffer, sample_size: int | None, policy_id: PolicyID) -> _TurnRows:
        algorithm = self.get_algorithm(policy_id)
        n_step = getattr(algorithm, "n_step", None)
        window = {} if n_step is None else {"n_step": n_step, "gamma": algorithm.gamma}
        batch, indices = buffer.sample(sample_size, **window)
        rows = _turns(batch, self._labels).get(policy_id, np.empty(0, np.intp))
        part = _own_rows(batch, rows)
        for name in ("rew", RETURNS):
            if name in part:
                part[name] = self._own_rewards(part[name], policy_id)
        return _TurnRows(part, indices[rows], buffer)


@dataclass
class _TurnRows:
    """Sampled rows in which one agent acts, with this agent's observations and rewards."""

    batch: Batch
    indices: npt.NDArray[np.intp]
    buffer: ReplayBuffer

    def __len__(self) -> int:
        return len(self.indices)

    def update(self, algorithm: Any) -> Any:
        """Update an algorithm of this library or of Tianshou; an update has the same stages in both libraries."""
        stages: Any = algorithm
        if isinstance(algorithm, Algorithm):
            return stages.update(self.batch)
        batch = stages._preprocess_batch(self.batch, self.buffer, self.indices)
        with policy_within_training_step(stages.policy), torch_train_mode(stages, True):
            return stages._update_with_batch(batch)


def _turns(batch: Batch, policies: Collection[PolicyID]) -> dict[PolicyID, npt.NDArray[np.intp]]:
    """Return the rows in which each policy's agent acts; policies without rows are omitted."""
    parts = values_of(batch.obs) or {}
    if _AGENT not in parts:
        raise ArgumentError(
            f"observations must have {_AGENT!r}, the agent that acts, where agents share a collector or buffer, got "
            f"{', '.join(map(repr, parts)) or 'one array'}; otherwise use MultiAgentCollector, MultiAgentReplayBuffer"
        )
    agents = np.asarray(parts[_AGENT])
    for agent in np.unique(agents).tolist():
        if agent not in policies:
            raise PolicyNotFoundError(f"no policy {agent!r}; {near_names(agent, policies)}")
    turns = {policy_id: np.flatnonzero(agents == policy_id) for policy_id in policies}
    return {policy_id: rows for policy_id, rows in turns.items() if len(rows)}


def _own_rows(batch: Batch, rows: npt.NDArray[np.intp]) -> Batch:
    """Select rows of an agent, without `agent_id`; observations with one remaining value become an array."""
    part: Batch = batch[rows]
    for name in ("obs", "obs_next"):
        values = {key: value for key, value in (values_of(part.get(name)) or {}).items() if key != _AGENT}
        if values:
            part[name] = values["obs"] if values.keys() == {"obs"} else Batch(values)
    return part


class MultiAgentOnPolicyAlgorithm(_Independent[OnPolicyAlgorithm[Any]]):
    """Independent on-policy learners: each policy learns from all steps of its agents.

    With a `ReplayBuffer` of agents that take turns, each policy learns from the turns of its agent. The reward of a
    turn is the sum of the agent's rewards until its next turn; the next observation is the observation at the agent's
    next turn. In a running episode, the agent's newest turn is incomplete: it only provides the next observation of
    the agent's previous turn.

    Parameters
    ----------
    algorithms, env
        As in `MultiAgentOffPolicyAlgorithm`. Algorithms of Tianshou also learn from turns.

    Raises
    ------
    ArgumentError
        If the length of a list of algorithms differs from the number of `env.agents`.
    """

    def create_trainer(self, params: OnPolicyTrainerParams) -> OnPolicyTrainer:
        """Create a trainer of the algorithms."""
        return OnPolicyTrainer(self, params)

    def update(
        self,
        buffer: MultiAgentReplayBuffer | MultiAgentBatch | ReplayBuffer,
        batch_size: int | None = None,
        repeat: int = 1,
    ) -> MultiAgentTrainingStats:
        """Update each policy with all steps of its agents.

        Parameters
        ----------
        buffer, batch_size, repeat
            Source of the steps, number of steps per minibatch (None for all), and number of passes over the steps.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        PolicyNotFoundError
            If there are steps of a policy without an algorithm.
        ArgumentError
            If `buffer` is not a multi-agent buffer or batch; or if steps of a `ReplayBuffer` have no `obs.agent_id`, or
            the number of rewards per step differs from the number of agents.
        """
        if isinstance(buffer, ReplayBuffer):
            require_steps(len(buffer))
            turns = {policy_id: self._turns_of(buffer, policy_id) for policy_id in self._labels}
            return self._update_each(
                turns, lambda algorithm, rows: _update_on_turns(algorithm, rows, batch_size, repeat)
            )
        if isinstance(buffer, MultiAgentBatch):
            batch, sizes = buffer, {policy_id: max(rows.count, 1) for policy_id, rows in buffer.items()}
            buffer = MultiAgentReplayBuffer(sizes)
            buffer.add(batch)
        parts = _buffers_of(buffer, batch_size)
        return self._update_each(parts, lambda algorithm, rows: algorithm.update(rows, batch_size, repeat))

    def _turns_of(self, buffer: ReplayBuffer, policy_id: PolicyID) -> Batch:
        """Return the turns of one agent as steps in time order, ring by ring."""
        indices = buffer.sample_indices(0)
        batch, n = buffer[indices], len(indices)
        turns = _turns(batch, self._labels).get(policy_id, np.empty(0, np.intp))
        is_last = np.asarray(batch.done, np.bool_).copy()
        ring = np.searchsorted(buffer.subbuffer_edges, indices, "right")
        is_last[:-1] |= ring[1:] != ring[:-1]
        is_last[-1:] = True
        episode_ends = np.flatnonzero(is_last)
        # The last row of the episode of each turn, and the row of the agent's next turn in it.
        last = episode_ends[np.searchsorted(episode_ends, turns)]
        after = np.append(turns[1:], n)
        continues = after <= last
        stop = np.where(continues, after, last + 1)
        rewards = np.append(self._own_rewards(batch.rew, policy_id), 0.0)
        part = batch[turns]
        part.rew = np.add.reduceat(rewards, np.stack([turns, stop], 1).reshape(-1))[::2] if len(turns) else rewards[:0]
        part.terminated = batch.terminated[last] & ~continues
        part.obs_next = batch.obs_next[last]
        if continues.any():
            part.obs_next[continues] = batch.obs[after[continues]]
        is_complete = continues | np.asarray(batch.done, np.bool_)[last]
        part.truncated = (batch.truncated[last] & ~continues) | (continues & ~np.append(is_complete[1:], True))
        part.done = part.terminated | part.truncated
        return _own_rows(part, np.flatnonzero(is_complete))


def _update_on_turns(algorithm: Any, turns: Batch, batch_size: int | None, repeat: int) -> Any:
    """Update an algorithm of this library or of Tianshou with the turns of its agent."""
    buffer = ReplayBuffer(len(turns))
    buffer.extend(Batch({name: turns[name] for name in _STEP}))
    with nullcontext() if isinstance(algorithm, Algorithm) else policy_within_training_step(algorithm.policy):
        return algorithm.update(buffer=buffer, batch_size=batch_size, repeat=repeat)


def _buffers_of(buffer: Any, size: Any) -> Mapping[PolicyID, ReplayBuffer]:
    if not isinstance(buffer, MultiAgentReplayBuffer):
        if not isinstance(buffer, SampleBatch | ReplayBuffer):
            require_source(buffer, size)
        raise ArgumentError(
            f"buffer must be a MultiAgentReplayBuffer or a MultiAgentBatch, got a {type(buffer).__name__}"
        )
    return buffer.buffers
