"""Independent learners: an algorithm for each policy of several agents, each with the steps of its own agents alone.

The plainest way to train several agents (Tan, ICML 1993). Agents that share a policy train it together; who acts by
which policy is the collector's `policy_mapping`.
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
    """Policies by id, for collectors and workers of several agents, and for trainers, to whom they are one.

    Parameters
    ----------
    policies
        The policies.

    Raises
    ------
    ArgumentError
        If there is none.
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
        """Whether policies are within a training step; set for all of them."""
        return any(policy.is_within_training_step for policy in self._policies.values())

    @is_within_training_step.setter
    def is_within_training_step(self, enabled: bool) -> None:
        for policy in self._policies.values():
            policy.is_within_training_step = enabled

    def get_exploration_state(self) -> dict[str, Any]:
        """Return the states of the exploration of each policy, by label."""
        labels = label_policies(self._policies)
        return {labels[policy_id]: policy.get_exploration_state() for policy_id, policy in self._policies.items()}

    def set_exploration_state(self, state: Mapping[str, Any]) -> None:
        """Let each policy explore on from a state that `get_exploration_state` returned."""
        for policy_id, label in label_policies(self._policies).items():
            self._policies[policy_id].set_exploration_state(state[label])

    def state_dict(self) -> dict[PolicyID, dict[str, Any]]:
        """Return the weights of each policy, as `RolloutWorkers.publish` takes them."""
        return {policy_id: policy.state_dict() for policy_id, policy in self._policies.items()}

    def load_state_dict(self, state: Mapping[PolicyID, Mapping[str, Any]]) -> None:
        """Load weights that `state_dict` returned.

        Raises
        ------
        PolicyNotFoundError
            If there are weights of a policy that is not there.
        """
        for policy_id, weights in state.items():
            if policy_id not in self._policies:
                raise PolicyNotFoundError(f"no policy {policy_id!r}; {near_names(policy_id, self._policies)}")
            self._policies[policy_id].load_state_dict(weights)


class MultiAgentTrainingStats(TrainingStats):
    """Figures of an update of several policies, for trainers and loggers.

    Parameters
    ----------
    by_policy
        The figures of each policy's update.
    """

    def __init__(self, by_policy: Mapping[PolicyID, TrainingStats]) -> None:
        super().__init__(train_time=sum(stats.train_time for stats in by_policy.values()))
        self.by_policy = dict(by_policy)

    def get_loss_stats_dict(self) -> dict[str, float]:
        """Return the figures of all policies, by names such as `walker/loss`."""
        labels = label_policies(self.by_policy)
        return {
            f"{labels[policy_id]}/{name}": value
            for policy_id, stats in self.by_policy.items()
            for name, value in stats.get_loss_stats_dict().items()
        }


class _Independent(Algorithm[Any], Generic[AlgorithmT]):
    """An algorithm for each policy.

    Parameters
    ----------
    algorithms
        The algorithms by the ids of policies.

    Attributes
    ----------
    policy
        The policies of all, a `MultiAgentPolicy`: for collectors, workers and trainers.
    """

    policy: MultiAgentPolicy

    def __init__(self, algorithms: Mapping[PolicyID, AlgorithmT]) -> None:
        super().__init__(policy=MultiAgentPolicy({own_id: one.policy for own_id, one in algorithms.items()}))
        self._labels = label_policies(algorithms)
        self.algorithms = nn.ModuleDict({self._labels[own_id]: one for own_id, one in algorithms.items()})

    @property
    def allow_nonfinite(self) -> bool:
        """Whether updates of each algorithm continue if a loss is NaN or infinite."""
        return all(one.allow_nonfinite for one in self.algorithms.values())

    @allow_nonfinite.setter
    def allow_nonfinite(self, allow: bool) -> None:
        # Each algorithm has its own until it is set for all.
        for one in vars(self)["_modules"].get("algorithms", {}).values():
            one.allow_nonfinite = allow

    def get_algorithm(self, policy_id: PolicyID) -> Any:
        """Return the algorithm of a policy.

        Raises
        ------
        PolicyNotFoundError
            If there is none.
        """
        if policy_id not in self._labels:
            raise PolicyNotFoundError(f"no policy {policy_id!r}; {near_names(policy_id, self._labels)}")
        return self.algorithms[self._labels[policy_id]]

    def _update_each(
        self, parts: Mapping[PolicyID, Any], update: Callable[[Any, Any], TrainingStats]
    ) -> MultiAgentTrainingStats:
        filled = {policy_id: (self.get_algorithm(policy_id), rows) for policy_id, rows in parts.items() if len(rows)}
        require_steps(len(filled))
        stats = {policy_id: update(algorithm, rows) for policy_id, (algorithm, rows) in filled.items()}
        self.updates += 1
        return MultiAgentTrainingStats(stats)


class MultiAgentOffPolicyAlgorithm(_Independent[OffPolicyAlgorithm[Any]]):
    """Independent learners that learn off policy, each from samples of its policy's part of a buffer.

    Parameters
    ----------
    algorithms
        The algorithms by the ids of policies; agents that share a policy share its algorithm.

    Attributes
    ----------
    policy
        The policies, a `MultiAgentPolicy`: for collectors, workers and trainers.

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
        """Create the trainer of the algorithm."""
        return OffPolicyTrainer(self, params)

    def update(
        self, buffer: MultiAgentReplayBuffer | MultiAgentBatch, sample_size: int | None = None
    ) -> MultiAgentTrainingStats:
        """Update each policy with rows drawn from its part of a buffer, or with its rows of a train batch.

        Parameters
        ----------
        buffer
            The buffer or batch.
        sample_size
            Rows for each policy, see `ReplayBuffer.sample`; None for a batch.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        PolicyNotFoundError
            If there are steps of a policy without an algorithm.
        ArgumentError
            As `OffPolicyAlgorithm.update` does, or if `buffer` is no buffer or batch of several policies.
        """
        parts = buffer.policy_batches if isinstance(buffer, MultiAgentBatch) else _buffers_of(buffer, sample_size)
        return self._update_each(parts, lambda algorithm, rows: algorithm.update(rows, sample_size))


class MultiAgentOnPolicyAlgorithm(_Independent[OnPolicyAlgorithm[Any]]):
    """Independent learners that learn on policy, each from all steps of its policy.

    Parameters
    ----------
    algorithms
        The algorithms by the ids of policies; agents that share a policy share its algorithm.

    Attributes
    ----------
    policy
        The policies, a `MultiAgentPolicy`: for collectors, workers and trainers.
    """

    def create_trainer(self, params: OnPolicyTrainerParams) -> OnPolicyTrainer:
        """Create the trainer of the algorithm."""
        return OnPolicyTrainer(self, params)

    def update(
        self, buffer: MultiAgentReplayBuffer | MultiAgentBatch, batch_size: int | None = None, repeat: int = 1
    ) -> MultiAgentTrainingStats:
        """Update each policy with all of its steps.

        Parameters
        ----------
        buffer
            The steps, in a buffer or in a batch as collectors and workers return it.
        batch_size, repeat
            Steps per minibatch, None for all, and passes over the steps.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        PolicyNotFoundError
            If there are steps of a policy without an algorithm.
        ArgumentError
            If `buffer` is no buffer or batch of several policies.
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
