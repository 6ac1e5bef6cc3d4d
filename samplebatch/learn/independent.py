"""Independent learners: one algorithm per policy, trained on the steps of its agents (Tan, ICML 1993).

Agents that share a policy train it together; `policy_mapping` of the collector assigns agents to policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch import nn

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError, PolicyNotFoundError, near_names
from samplebatch.learn.algorithm import (
    Algorithm,
    OffPolicyAlgorithm,
    OnPolicyAlgorithm,
    TrainingStats,
    require_source,
    require_steps,
)
from samplebatch.learn.policy import Policy
from samplebatch.learn.trainer import OffPolicyTrainer, OffPolicyTrainerParams, OnPolicyTrainer, OnPolicyTrainerParams
from samplebatch.names import PolicyID, label_policies

AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm[Any])


class MultiAgentPolicy(Mapping[PolicyID, Policy]):
    """Policies by id, for collectors and workers with several agents, and as one policy for trainers.

    Raises
    ------
    ArgumentError
        If `policies` is empty.
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

    @property
    def is_within_training_step(self) -> bool:
        """Whether any policy is within a training step; setting applies to all policies."""
        return any(policy.is_within_training_step for policy in self._policies.values())

    @is_within_training_step.setter
    def is_within_training_step(self, enabled: bool) -> None:
        for policy in self._policies.values():
            policy.is_within_training_step = enabled

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the exploration state of each policy, by label."""
        labels = label_policies(self._policies)
        return {labels[policy_id]: policy.get_exploration_state() for policy_id, policy in self._policies.items()}

    def set_exploration_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_exploration_state`."""
        for policy_id, label in label_policies(self._policies).items():
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
            gradient_steps=sum(stats.gradient_steps for stats in by_policy.values()),
        )
        self.by_policy = dict(by_policy)

    def get_loss_stats_dict(self) -> dict[str, float]:
        """Return the metrics of all policies, by names such as `walker/loss`."""
        labels = label_policies(self.by_policy)
        return {
            f"{labels[policy_id]}/{name}": value
            for policy_id, stats in self.by_policy.items()
            for name, value in stats.get_loss_stats_dict().items()
        }


class _Independent(Algorithm[Any], Generic[AlgorithmT]):
    """One algorithm per policy."""

    policy: MultiAgentPolicy

    def __init__(self, algorithms: Mapping[PolicyID, AlgorithmT]) -> None:
        policies = {policy_id: algorithm.policy for policy_id, algorithm in algorithms.items()}
        super().__init__(policy=MultiAgentPolicy(policies))
        self._labels = label_policies(algorithms)
        self.algorithms = nn.ModuleDict(
            {self._labels[policy_id]: algorithm for policy_id, algorithm in algorithms.items()}
        )

    @property
    def allow_nonfinite(self) -> bool:
        """Whether updates of all algorithms continue if a loss is NaN or infinite."""
        return all(algorithm.allow_nonfinite for algorithm in self.algorithms.values())

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

    def _update_each(
        self, parts: Mapping[PolicyID, Any], update: Callable[[Any, Any], TrainingStats]
    ) -> MultiAgentTrainingStats:
        nonempty = {policy_id: (self.get_algorithm(policy_id), rows) for policy_id, rows in parts.items() if len(rows)}
        require_steps(len(nonempty))
        stats = {policy_id: update(algorithm, rows) for policy_id, (algorithm, rows) in nonempty.items()}
        self.updates += 1
        return MultiAgentTrainingStats(stats)


class MultiAgentOffPolicyAlgorithm(_Independent[OffPolicyAlgorithm[Any]]):
    """Independent off-policy learners: each policy learns from samples of its part of a buffer.

    Parameters
    ----------
    algorithms
        Algorithms by policy id; agents that share a policy share its algorithm. The attribute `policy` contains the
        policies as a `MultiAgentPolicy`, for collectors, workers and trainers.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> from samplebatch.learn import DQN, AdamOptimizerFactory, DiscreteQLearningPolicy
    >>> learners = {}
    >>> for role, width in {"adversary": 16, "agent": 14}.items():
    ...     policy = DiscreteQLearningPolicy(model=nn.Linear(width, 5), action_space=spaces.Discrete(5))
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
        self, buffer: MultiAgentReplayBuffer | MultiAgentBatch, sample_size: int | None = None
    ) -> MultiAgentTrainingStats:
        """Update each policy with sampled rows of its part of a buffer, or with its rows of a train batch.

        Parameters
        ----------
        buffer, sample_size
            The buffer or batch, and rows per policy, see `ReplayBuffer.sample`; None for a batch.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        PolicyNotFoundError
            If there are steps of a policy without an algorithm.
        ArgumentError
            As `OffPolicyAlgorithm.update` does, or if `buffer` is not a multi-agent buffer or batch.
        """
        parts = buffer.policy_batches if isinstance(buffer, MultiAgentBatch) else _buffers_of(buffer, sample_size)
        return self._update_each(parts, lambda algorithm, rows: algorithm.update(rows, sample_size))


class MultiAgentOnPolicyAlgorithm(_Independent[OnPolicyAlgorithm[Any]]):
    """Independent on-policy learners: each policy learns from all its steps.

    Parameters
    ----------
    algorithms
        As in `MultiAgentOffPolicyAlgorithm`.
    """

    def create_trainer(self, params: OnPolicyTrainerParams) -> OnPolicyTrainer:
        """Create a trainer of the algorithms."""
        return OnPolicyTrainer(self, params)

    def update(
        self, buffer: MultiAgentReplayBuffer | MultiAgentBatch, batch_size: int | None = None, repeat: int = 1
    ) -> MultiAgentTrainingStats:
        """Update each policy with all its steps.

        Parameters
        ----------
        buffer, batch_size, repeat
            The steps, steps per minibatch, None for all, and passes over the steps.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        PolicyNotFoundError
            If there are steps of a policy without an algorithm.
        ArgumentError
            If `buffer` is not a multi-agent buffer or batch.
        """
        if isinstance(buffer, MultiAgentBatch):
            batch, sizes = buffer, {policy_id: max(rows.count, 1) for policy_id, rows in buffer.items()}
            buffer = MultiAgentReplayBuffer(sizes)
            buffer.add(batch)
        parts = _buffers_of(buffer, batch_size)
        return self._update_each(parts, lambda algorithm, rows: algorithm.update(rows, batch_size, repeat))


def _buffers_of(buffer: Any, size: Any) -> Mapping[PolicyID, ReplayBuffer]:
    if not isinstance(buffer, MultiAgentReplayBuffer):
        if not isinstance(buffer, SampleBatch | ReplayBuffer):
            require_source(buffer, size)
        raise ArgumentError(
            f"buffer must be a MultiAgentReplayBuffer or a MultiAgentBatch, got a {type(buffer).__name__}"
        )
    return buffer.buffers
