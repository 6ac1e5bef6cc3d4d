"""Algorithm: the base of update rules, on policy, off policy and offline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from samplebatch.arguments import check_names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.convert.experience import open_source
from samplebatch.errors import ArgumentError, EmptyBufferError, NonFiniteLossError
from samplebatch.learn.networks import LaggedNetwork, follow, set_training
from samplebatch.learn.optimizer import Optimizer, OptimizerFactory, require_factory
from samplebatch.learn.policy import Policy, policy_within_training_step, torch_train_mode
from samplebatch.learn.trainer import (
    InfoStats,
    OfflineTrainer,
    OfflineTrainerParams,
    OffPolicyTrainer,
    OffPolicyTrainerParams,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
    Trainer,
    require_finite_losses,
)
from samplebatch.names import GENERATION, WEIGHT
from samplebatch.returns import batches as returns
from samplebatch.returns.batches import value_mask
from samplebatch.rollout.statistics import PrintedAsDict, SequenceSummaryStats
from samplebatch.service.client import ReplayClient
from samplebatch.storage.datasets.mixed_sampler import MixedIndices, sample_steps

PolicyT = TypeVar("PolicyT", bound=Policy)
StatsT = TypeVar("StatsT", bound="TrainingStats")
Indices = npt.NDArray[np.intp]
_RENAMED = {
    "optimizer": "optim",
    "actor_optim": "policy_optim",
    "critic1": "critic",
    "critic1_optim": "critic_optim",
    "discount_factor": "gamma",
    "estimation_step": "n_step_return_horizon",
    "n_step": "n_step_return_horizon",
    "reward_normalization": "return_scaling",
    "lr": "optim=AdamOptimizerFactory(lr=...)",
    "policy_lr": "policy_optim=AdamOptimizerFactory(lr=...)",
    "clip_range": "eps_clip",
    "clip_param": "eps_clip",
    "lam": "gae_lambda",
    "lambda_": "gae_lambda",
    "entropy_coeff": "ent_coef",
    "vf_loss_coeff": "vf_coef",
    "model": "policy",
}
"""Arguments in Tianshou 0.5 and 1, RLlib and Stable-Baselines3, with their names here."""


@dataclass(kw_only=True)
class TrainingStats(PrintedAsDict):
    """Figures of an update, for trainers and loggers. Algorithms derive their own, with losses.

    Attributes
    ----------
    train_time
        Duration of the update in seconds.
    smoothed_loss
        Moving averages of losses, which trainers add.
    """

    train_time: float = 0.0
    smoothed_loss: dict[str, float] = field(default_factory=dict)

    def get_loss_stats_dict(self) -> dict[str, float]:
        """Return the figures that algorithms add, by name: numbers, and the means of summaries. None is left out.

        Examples
        --------
        >>> SimpleLossTrainingStats(loss=0.5).get_loss_stats_dict()
        {'loss': 0.5}
        """
        found = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and one.name not in ("train_time", "smoothed_loss"):
                found[one.name] = value.mean if isinstance(value, SequenceSummaryStats) else value
        return found


@dataclass(kw_only=True)
class SimpleLossTrainingStats(TrainingStats):
    """Figures of an update of one gradient step.

    Attributes
    ----------
    loss
        The loss.
    """

    loss: float


class Algorithm(nn.Module, Generic[PolicyT], ABC):
    """An update rule for a policy, run by trainers.

    An update samples a batch as tensors on the device of the parameters. Then `_preprocess_batch` adds targets,
    `_update_with_batch` performs gradient steps, and `_postprocess_batch` updates priorities. `_create_optimizer`
    creates optimizers, `_add_lagged_network` target networks; `state_dict` contains both.

    Parameters
    ----------
    policy
        The trained policy.
    allow_nonfinite
        Whether updates continue if a loss is NaN or infinite, which makes weights NaN.

    Attributes
    ----------
    n_step, gamma
        Maximum steps that a sampled row represents, None for single steps, and the discount per step; see
        `ReplayBuffer.sample`. Algorithms with targets set them.
    lr_schedulers
        The schedules of learning rates, stepped after each update.
    updates
        Updates so far.
    """

    n_step: int | None = None
    gamma: float = 0.99
    policy: PolicyT

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Reject unknown arguments with the near names."""
        check_names(cls, args, options, _RENAMED)
        return super().__new__(cls)

    def __init__(self, *, policy: PolicyT, allow_nonfinite: bool = False) -> None:
        super().__init__()
        if isinstance(policy, nn.Module) and not hasattr(policy, "is_within_training_step"):
            raise ArgumentError(
                f"policy must be a policy, got a {type(policy).__name__}; pass the network to a policy such as "
                "DiscreteQLearningPolicy(model=...) or ProbabilisticActorPolicy(actor=...)"
            )
        if isinstance(policy, Policy):
            policy.attach_learner(self)
        self.policy = policy
        self.lr_schedulers: list[LRScheduler] = []
        self.updates = 0
        self._optimizers: list[Optimizer] = []
        self._lagged_networks: list[LaggedNetwork] = []
        self.allow_nonfinite = allow_nonfinite

    @property
    def allow_nonfinite(self) -> bool:
        """Whether updates continue if a loss is NaN or infinite."""
        return self._allow_nonfinite

    @allow_nonfinite.setter
    def allow_nonfinite(self, allow: bool) -> None:
        self._allow_nonfinite = allow
        for optimizer in self._optimizers:
            optimizer.requires_finite = not allow

    def train(self, mode: bool = True) -> Self:
        """Set torch's training mode; an update goes through both modes."""
        set_training(self, mode)
        return self

    # For algorithms: what they are made of

    def _create_optimizer(
        self, module: nn.Module, factory: OptimizerFactory, max_grad_norm: float | None = None
    ) -> Optimizer:
        """Make an optimizer of a module's parameters, with its state a part of the algorithm's.

        Parameters
        ----------
        module
            The module with the parameters.
        factory
            Optimizer factory, with a learning-rate schedule if it has one.
        max_grad_norm
            Maximum L2 norm of all gradients; None for no clipping.
        """
        require_factory(factory)
        optimizer, scheduler = factory.create_instances(module)
        if scheduler is not None:
            self.lr_schedulers.append(scheduler)
        self._optimizers.append(Optimizer(optimizer, module, max_grad_norm))
        self._optimizers[-1].requires_finite = not self.allow_nonfinite
        return self._optimizers[-1]

    def _add_lagged_network(self, source: nn.Module) -> LaggedNetwork:
        self._lagged_networks.append(LaggedNetwork(source))
        return self._lagged_networks[-1]

    def _update_lagged_network_weights(self, tau: float = 1.0) -> None:
        """Move all lagged networks towards their sources: copies for a `tau` of 1, Polyak averages for less."""
        follow(self._lagged_networks, tau)

    # For algorithms: the parts of an update

    def _sample_batch(self, buffer: Any, sample_size: int | None) -> tuple[Batch, Indices]:
        """Draw rows of a buffer, as tensors on the device and in the floating-point dtype of the parameters."""
        batch, indices = buffer.sample(sample_size, **self._rows_wanted())
        return batch, indices

    def _rows_wanted(self) -> dict[str, Any]:
        """Return the arguments of `sample`: how many steps rows stand for, and the parameters' device and dtype."""
        parameter = next(self.parameters())
        return {"n_step": self.n_step, "gamma": self.gamma, "device": parameter.device, "floats": parameter.dtype}

    def _preprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        """Add columns that are computed before any gradient step: targets, advantages. Networks are in evaluation mode.

        Parameters
        ----------
        batch
            The rows, which may be changed.
        buffer, indices
            The buffer that they come from, and where in it they are.
        """
        return batch

    def _postprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> None:
        """Give the rows of a prioritized buffer the priorities that `_update_with_batch` put under `weight`, if any.

        Rows that were written over in the meantime keep theirs; so do rows whose new one is not finite, where that is
        allowed.
        """
        # The class is looked at, as a buffer goes through its columns for names that it has not.
        if WEIGHT in batch and hasattr(type(buffer), "update_weight"):
            weights, generation = batch[WEIGHT], batch.get(GENERATION)
            if self.allow_nonfinite:
                finite = torch.as_tensor(weights).isfinite().cpu().numpy()
                indices = indices.at(finite) if isinstance(indices, MixedIndices) else indices[finite]
                weights = weights[finite]
                generation = None if generation is None else generation[finite]
            buffer.update_weight(indices, weights, generation=generation)

    def _update(
        self,
        buffer: ReplayBuffer,
        sample_size: int | None,
        update_with_batch: Callable[[Batch], TrainingStats],
    ) -> TrainingStats:

        def update() -> TrainingStats:
            batch, indices = self._sample_batch(buffer, sample_size)
            batch = self.policy.in_policy_unit(batch)
            batch = self._preprocess_batch(batch, buffer, indices)
            sampled = batch.get(WEIGHT)
            self.train()
            stats = self._require_finite(lambda: update_with_batch(batch), batch)
            by_priority = sampled is not None or GENERATION in batch
            if WEIGHT in batch and (batch[WEIGHT] is sampled or not by_priority):
                # Importance weights that are still there are no priorities, and others take none.
                del batch[WEIGHT]
            self._postprocess_batch(batch, buffer, indices)
            return stats

        return self._run_update(update)

    def _require_finite(self, update: Callable[[], StatsT], batch: Any) -> StatsT:
        """Perform an update; stop at the first loss that is not finite, unless that is allowed.

        Losses on the host are read before their step, and others with the figures of the update.

        Raises
        ------
        NonFiniteLossError
            If a loss is not finite; names the update and the columns of the batch with such values.
        """
        try:
            stats = update()
            if not self.allow_nonfinite:
                require_finite_losses(stats.get_loss_stats_dict())
        except NonFiniteLossError as error:
            names = ", ".join(map(repr, _nonfinite_columns(batch)))
            where = f"columns with such values: {names}" if names else "all columns are finite"
            raise NonFiniteLossError(
                f"{error} in update {self.updates + 1}; {where}; pass allow_nonfinite=True to continue"
            ) from None
        return stats

    def _run_update(self, update: Callable[[], StatsT]) -> StatsT:
        """Run an update within a training step, count it and time it; networks are in evaluation mode at first."""
        start = perf_counter()
        with policy_within_training_step(self.policy), torch_train_mode(self, False):
            stats = update()
        for scheduler in self.lr_schedulers:
            scheduler.step()
        self.updates += 1
        stats.train_time = perf_counter() - start
        return stats

    # Training

    @abstractmethod
    def create_trainer(self, params: Any) -> Trainer[Any]:
        """Create the trainer of the algorithm.

        Parameters
        ----------
        params
            How long to train, with which collectors: `OnPolicyTrainerParams`, `OffPolicyTrainerParams` or
            `OfflineTrainerParams`.
        """

    def run_training(self, params: Any) -> InfoStats:
        """Train with the trainer of `create_trainer`, and return its report."""
        return self.create_trainer(params).run()

    # State

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continue from the state that `state_dict` returned; arguments and result are those of torch's modules.

        Raises
        ------
        ArgumentError
            If the state is of other networks; names the first parameter that differs, before anything is loaded.
        """
        wanted, found = _shapes(self.state_dict()), _shapes(state_dict)
        for name in [*wanted, *found] if strict else wanted.keys() & found.keys():
            if name not in wanted:
                raise ArgumentError(f"state must have no parameter {name!r}, as the algorithm has none of that name")
            if wanted[name] != found.get(name):
                raise ArgumentError(
                    f"parameter {name!r} must have shape {wanted[name]}, as in the algorithm, "
                    f"got {found.get(name, 'no such parameter')}"
                )
        return super().load_state_dict(state_dict, strict, assign)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the part of `state_dict` beside parameters: optimizers, schedules, exploration, the count of updates.

        An algorithm with more to go on from returns more, and takes it in `set_extra_state`.
        """
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "lr_schedulers": [scheduler.state_dict() for scheduler in self.lr_schedulers],
            "exploration": self.policy.get_exploration_state(),
            "updates": self.updates,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `get_extra_state` returned.

        Raises
        ------
        ArgumentError
            If it has another number of optimizers or schedules.
        """
        parts: dict[str, Sequence[Any]] = {"optimizers": self._optimizers, "lr_schedulers": self.lr_schedulers}
        for name, own in parts.items():
            if len(state[name]) != len(own):
                raise ArgumentError(f"state must have {len(own)} {name}, as the algorithm has, got {len(state[name])}")
            for one, kept in zip(own, state[name], strict=True):
                one.load_state_dict(kept)
        self.policy.set_exploration_state(state["exploration"])
        self.updates = state["updates"]

    # Returns

    value_mask = staticmethod(value_mask)
    compute_episodic_return = staticmethod(returns.compute_episodic_return)
    compute_nstep_return = staticmethod(returns.compute_nstep_return)


def _nonfinite_columns(batch: Any, path: str = "") -> Iterator[str]:
    for name, value in batch.items():
        if hasattr(value, "items"):
            yield from _nonfinite_columns(value, f"{path}{name}.")
        elif isinstance(value, torch.Tensor | np.ndarray):
            tensor = torch.as_tensor(value) if value.dtype != object else torch.empty(0)
            if not bool(tensor.isfinite().all()):
                yield f"{path}{name}"


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}


def require_source(buffer: Any, size: Any) -> None:
    """Raise ArgumentError if the first argument of `update` is no source of steps of one policy."""
    if buffer is None or isinstance(buffer, int | np.integer):
        hint = f"; the order is update(buffer, {buffer})" if not isinstance(size, int | None) else ""
        raise ArgumentError(f"buffer must be a replay buffer or a batch, got {buffer!r}{hint}")
    if isinstance(buffer, MultiAgentBatch):
        raise ArgumentError(
            "buffer must have the steps of one policy, got a MultiAgentBatch; pass batch['policy_id'], or use an "
            "algorithm of several policies such as MultiAgentOnPolicyAlgorithm"
        )


def require_steps(count: int) -> None:
    """Raise EmptyBufferError if there are no steps to learn from."""
    if not count:
        raise EmptyBufferError("a buffer must have steps to learn from, it has none; collect some first")


class OnPolicyAlgorithm(Algorithm[PolicyT], ABC):
    """An update rule that learns from all steps of a buffer at once, which the policy has just collected.

    Attributes
    ----------
    allows_stale_steps
        Whether it corrects for steps of an earlier policy, so that workers may collect while it updates (`overlap` of
        `OnPolicyTrainerParams`). Other algorithms treat all steps as those of the newest policy.
    """

    allows_stale_steps: bool = False

    def create_trainer(self, params: OnPolicyTrainerParams) -> OnPolicyTrainer:
        """Create the trainer of the algorithm."""
        return OnPolicyTrainer(self, params)

    def _postprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> None:
        super()._postprocess_batch(batch, buffer, indices)
        # After the gradient steps: the policy that collected the steps and the updated one normalize alike.
        if isinstance(self.policy, Policy):
            self.policy.update_statistics(batch)

    def update(self, buffer: Any, batch_size: int | None = None, repeat: int = 1) -> TrainingStats:
        """Update the policy with all steps of a buffer or batch.

        Parameters
        ----------
        buffer
            A replay buffer, or a `SampleBatch` or `Batch` of steps in time order, episode by episode.
        batch_size
            Steps per minibatch; None for all.
        repeat
            Passes over the steps.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        ArgumentError
            If `buffer` is neither a buffer nor a batch of one policy.

        Examples
        --------
        >>> from gymnasium import spaces
        >>> from samplebatch import Collector
        >>> from samplebatch.learn import PPO, AdamOptimizerFactory, DiscreteActorPolicy, DiscreteCritic, Net
        >>> policy = DiscreteActorPolicy(actor=Net(4, 2, [8]), action_space=spaces.Discrete(2))
        >>> critic = DiscreteCritic(Net(4, hidden_sizes=[8]))
        >>> algorithm = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory())
        >>> batch = Collector(policy, "CartPole-v1").collect(n_step=64).batch
        >>> algorithm.update(batch, batch_size=32, repeat=2).gradient_steps
        4
        """
        require_source(buffer, batch_size)
        if isinstance(buffer, SampleBatch | Batch):
            require_steps(len(buffer))
            batch, buffer = buffer, ReplayBuffer(len(buffer))
            buffer.extend(batch)
        require_steps(len(buffer))
        return self._update(buffer, 0, lambda batch: self._update_with_batch(batch, batch_size, repeat))

    @abstractmethod
    def _update_with_batch(self, batch: Batch, batch_size: int | None, repeat: int) -> TrainingStats:
        """Perform gradient steps on the minibatches of a batch."""

    def _minibatches(self, batch: Batch, batch_size: int | None, columns: Sequence[str]) -> Iterator[Batch]:
        """Go over some columns of all rows once, in an order that torch's default generator draws.

        A last minibatch that would be smaller than the others is a part of the one before it.
        """
        # One gather a pass: the minibatches are views of it.
        shuffled: Batch = Batch({name: batch[name] for name in columns})[torch.randperm(len(batch))]
        yield from shuffled.split(batch_size or len(batch), shuffle=False, merge_last=True)


class _SamplingAlgorithm(Algorithm[PolicyT], ABC):
    augment: Callable[[Any], Any] | None = None
    """Augmentation of sampled observations and next observations, such as `RandomShift`; None for none."""

    def update(self, buffer: Any, sample_size: int | None = None) -> TrainingStats:
        """Update the policy with rows drawn from a buffer, or with all rows of a batch.

        Parameters
        ----------
        buffer
            A replay buffer or a client of a replay service; a `Dataset` or `MixedSampler`, whose rows are one step
            each; or a train batch, a `SampleBatch` or `Batch` of such rows.
        sample_size
            Number of rows, see `ReplayBuffer.sample`: None for all in random order, 0 for all in time order. Of a
            batch, all rows are used.

        Raises
        ------
        EmptyBufferError
            If there are no rows.
        ArgumentError
            If `buffer` is neither a buffer nor a batch of one policy, a `sample_size` is given for a batch, or rows of
            a dataset or batch must represent several steps.
        ColumnNotFoundError
            If rows of a dataset or batch lack a column that targets need; names it.
        """
        require_source(buffer, sample_size)
        if isinstance(buffer, SampleBatch | Batch):
            if sample_size:
                raise ArgumentError(f"sample_size must be None for a batch, whose rows are all used, got {sample_size}")
            require_steps(len(buffer))
        return self._update(buffer, sample_size, self._update_with_batch)

    def _sample_batch(self, buffer: Any, sample_size: int | None) -> tuple[Batch, Any]:
        if isinstance(buffer, ReplayBuffer | ReplayClient):
            batch, indices = super()._sample_batch(buffer, sample_size)
        else:
            batch, indices = sample_steps(buffer, sample_size, **self._rows_wanted())
        if self.augment is not None:
            for name in ("obs", "obs_next"):
                if name in batch:
                    batch[name] = self.augment(batch[name])
        return batch, indices

    @abstractmethod
    def _update_with_batch(self, batch: Batch) -> TrainingStats:
        """Perform a gradient step on a batch."""


class OffPolicyAlgorithm(_SamplingAlgorithm[PolicyT], ABC):
    """An update rule that learns from samples of a replay buffer, while more steps are collected.

    Attributes
    ----------
    augment
        Augmentation of sampled observations and next observations, such as `RandomShift`; None for none.
    """

    def create_trainer(self, params: OffPolicyTrainerParams) -> OffPolicyTrainer:
        """Create the trainer of the algorithm."""
        return OffPolicyTrainer(self, params)


class OfflineAlgorithm(_SamplingAlgorithm[PolicyT], ABC):
    """An update rule that learns from samples of a buffer, dataset or folder that somebody else filled."""

    def process_buffer(self, buffer: Any) -> Any:
        """Prepare rows before training begins, and return those to update with. Algorithms that need columns add them.

        Parameters
        ----------
        buffer
            A replay buffer, `Dataset` or `MixedSampler`, which is returned; or a path: a dataset's folder is opened,
            Parquet files that another library wrote are read into a replay buffer.

        Raises
        ------
        ArgumentError, FormatError, SampleBatchError, OSError
            As `samplebatch.convert.experience.open_source` does.
        """
        return open_source(buffer)

    def create_trainer(self, params: OfflineTrainerParams) -> OfflineTrainer:
        """Create the trainer of the algorithm."""
        return OfflineTrainer(self, params)
