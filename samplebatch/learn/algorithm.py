"""Algorithm: base classes of on-policy, off-policy and offline algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from samplebatch.arguments import check_names, suggest_names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.convert.experience import open_source
from samplebatch.errors import ArgumentError, EmptyBufferError, NonFiniteLossError
from samplebatch.learn import trainer
from samplebatch.learn.networks import LaggedNetwork, follow, set_training
from samplebatch.learn.normalization import AddedRows
from samplebatch.learn.optimizer import Optimizer, OptimizerFactory, require_factory
from samplebatch.learn.policy import Policy, policy_within_training_step, torch_train_mode
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
"""Argument names of Tianshou 0.5 and 1, RLlib and Stable-Baselines3, with the current names."""
_NOT_METRICS = ("train_time", "smoothed_loss", "gradient_steps")


@dataclass(kw_only=True)
class TrainingStats(PrintedAsDict):
    """Base class of update statistics for trainers and loggers; subclasses add losses.

    Attributes
    ----------
    train_time, smoothed_loss
        Duration of the update in seconds; and moving averages of losses, set by trainers.
    gradient_steps
        Number of gradient steps of all policies.
    """

    train_time: float = 0.0
    smoothed_loss: dict[str, float] = field(default_factory=dict)
    gradient_steps: int = 1

    def get_loss_stats_dict(self) -> dict[str, float]:
        """Return the algorithm's metrics by name: summaries as their means, without values of None.

        Examples
        --------
        >>> SimpleLossTrainingStats(loss=0.5).get_loss_stats_dict()
        {'loss': 0.5}
        """
        metrics = {}
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if value is not None and attribute.name not in _NOT_METRICS:
                metrics[attribute.name] = value.mean if isinstance(value, SequenceSummaryStats) else value
        return metrics


@dataclass(kw_only=True)
class SimpleLossTrainingStats(TrainingStats):
    """Statistics of an update with one gradient step and one loss."""

    loss: float


def summarize(metrics: list[torch.Tensor], count: int) -> list[SequenceSummaryStats | None]:
    """Summarize `count` metrics over all gradient steps, with one copy from the device; None if there are no steps."""
    steps = torch.stack(metrics).cpu().numpy().reshape(-1, count) if metrics else np.empty((0, count))
    return [SequenceSummaryStats.from_sequence(values) for values in steps.T]


class Algorithm(nn.Module, Generic[PolicyT], ABC):
    """Base class of algorithms: the update rules that trainers apply to policies.

    An update samples a batch as tensors on the device of the parameters. For each sampled batch, `_preprocess_batch`
    adds targets, `_update_with_batch` performs gradient steps, and `_postprocess_batch` updates priorities.
    `_create_optimizer` creates optimizers, and `_add_lagged_network` creates target networks; `state_dict` contains the
    optimizers and the target networks.

    Parameters
    ----------
    policy
        Policy to train.
    allow_nonfinite
        Whether updates continue after a NaN or infinite loss, although the weights then become NaN.

    Attributes
    ----------
    n_step, gamma
        Maximum number of steps per sampled row (None for single steps), and the discount per step; see
        `ReplayBuffer.sample`. Algorithms with targets set both attributes.
    lr_schedulers, updates
        Learning-rate schedules, which are stepped after each update, and the number of updates so far.

    Raises
    ------
    ArgumentError
        If `policy` is a network, or a policy of a class that the algorithm does not train.
    """

    n_step: int | None = None
    gamma: float = 0.99
    policy: PolicyT
    _policy_class: ClassVar[type] = Policy
    """Class of the policies that the algorithm trains."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Reject unknown keyword arguments; the error suggests similar names."""
        check_names(cls, args, options, _RENAMED)
        return super().__new__(cls)

    def __init__(self, *, policy: PolicyT, allow_nonfinite: bool = False) -> None:
        super().__init__()
        if isinstance(policy, nn.Module) and not hasattr(policy, "is_within_training_step"):
            raise ArgumentError(
                f"policy must be a policy, got a {type(policy).__name__}; pass the network to a policy such as "
                "DiscreteQLearningPolicy(model=...) or ProbabilisticActorPolicy(actor=...)"
            )
        if not isinstance(policy, self._policy_class):
            raise ArgumentError(
                f"policy of {type(self).__name__} must be an instance of {self._policy_class.__name__}, got a "
                f"{type(policy).__name__} of {type(policy).__module__}"
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
        """Set torch's training mode; updates set training or evaluation mode themselves.

        Raises
        ------
        ArgumentError
            If `mode` is not a bool, for example if a number of steps is passed.
        """
        if mode is not True and mode is not False:
            raise ArgumentError(f"mode must be True or False, got {mode!r}; run_training(params) trains the policy")
        set_training(self, mode)
        return self

    # For subclasses: components

    def _create_optimizer(
        self, module: nn.Module, factory: OptimizerFactory, max_grad_norm: float | None = None
    ) -> Optimizer:
        """Create an optimizer of a module's parameters, and include its state in `state_dict`."""
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
        """Update all lagged networks from their sources; see `LaggedNetwork.follow`."""
        follow(self._lagged_networks, tau)

    # For subclasses: stages of an update

    def _sample_batch(self, buffer: Any, sample_size: int | None) -> tuple[Batch, Indices]:
        """Sample rows as tensors on the parameters' device; floats have the parameters' dtype."""
        batch, indices = buffer.sample(sample_size, **self._sample_options())
        return batch, indices

    def _sample_options(self) -> dict[str, Any]:
        parameter = next(self.parameters())
        return {"n_step": self.n_step, "gamma": self.gamma, "device": parameter.device, "floats": parameter.dtype}

    def _preprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        """Add columns that are computed before the gradient steps, such as targets; networks are in evaluation mode.

        The batch may be modified in place; `indices` are the indices of the batch's rows in `buffer`.
        """
        return batch

    def _postprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> None:
        """Copy the priorities that `_update_with_batch` stored in the column `weight` to a prioritized buffer.

        Rows that have been overwritten since they were sampled are skipped, as are non-finite priorities if
        `allow_nonfinite` is true.
        """
        # Looked up on the class: attribute access on a buffer searches its columns.
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
            is_prioritized = sampled is not None or GENERATION in batch
            if WEIGHT in batch and (batch[WEIGHT] is sampled or not is_prioritized):
                # Unchanged importance weights are not priorities, and other buffers accept none.
                del batch[WEIGHT]
            self._postprocess_batch(batch, buffer, indices)
            return stats

        return self._run_update(update)

    def _require_finite(self, update: Callable[[], StatsT], batch: Any) -> StatsT:
        """Perform an update; if `allow_nonfinite` is false, raise NonFiniteLossError at the first non-finite loss.

        Losses on the host are checked before their gradient step; losses on a device are checked at the end of the
        update.
        """
        try:
            stats = update()
            if not self.allow_nonfinite:
                trainer.require_finite_losses(stats.get_loss_stats_dict())
        except NonFiniteLossError as error:
            names = ", ".join(map(repr, _nonfinite_columns(batch)))
            columns = f"columns with such values: {names}" if names else "all columns are finite"
            raise NonFiniteLossError(
                f"{error} in update {self.updates + 1}; {columns}; pass allow_nonfinite=True to continue"
            ) from None
        return stats

    def _run_update(self, update: Callable[[], StatsT]) -> StatsT:
        """Run, count and time an update within a training step; networks are initially in evaluation mode."""
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
    def create_trainer(self, params: Any) -> trainer.Trainer[Any]:
        """Create a trainer of the algorithm; `params` are the trainer's `TrainerParams`."""

    @suggest_names(**dict.fromkeys(("max_epochs", "max_epoch", "training_collector"), "params=...TrainerParams(...)"))
    def run_training(self, params: Any) -> trainer.InfoStats:
        """Create and run a trainer of the algorithm; return the summary of the training run."""
        return self.create_trainer(params).run()

    # State

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restore a state from `state_dict`; see `torch.nn.Module.load_state_dict` for arguments and result.

        Raises
        ------
        ArgumentError
            If the names or shapes of the parameters in the state differ from the algorithm's parameters; the message
            names the first parameter that differs. Nothing is loaded.
        """
        expected, loaded = _parameter_shapes(self.state_dict()), _parameter_shapes(state_dict)
        for name in [*expected, *loaded] if strict else expected.keys() & loaded.keys():
            if name not in expected:
                raise ArgumentError(f"state must have only parameters of the algorithm, got {name!r}")
            if expected[name] != loaded.get(name):
                raise ArgumentError(
                    f"parameter {name!r} must have shape {expected[name]}, as in the algorithm, "
                    f"got {loaded.get(name, 'no such parameter')}"
                )
        return super().load_state_dict(state_dict, strict, assign)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state that torch does not track: optimizers, schedules, exploration and the number of updates.

        Subclasses with additional state extend this method and `set_extra_state`.
        """
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "lr_schedulers": [scheduler.state_dict() for scheduler in self.lr_schedulers],
            "exploration": self.policy.get_exploration_state(),
            "updates": self.updates,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_extra_state`.

        Raises
        ------
        ArgumentError
            If the number of optimizers or schedules in the state differs from the number in the algorithm.
        """
        components: dict[str, Sequence[Any]] = {"optimizers": self._optimizers, "lr_schedulers": self.lr_schedulers}
        for name, parts in components.items():
            if len(state[name]) != len(parts):
                raise ArgumentError(
                    f"state must have {len(parts)} {name}, as the algorithm has, got {len(state[name])}"
                )
            for part, part_state in zip(parts, state[name], strict=True):
                part.load_state_dict(part_state)
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


def _parameter_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}


def require_source(buffer: Any, size: Any) -> None:
    """Raise ArgumentError if the first argument of `update` does not contain steps of one policy."""
    if buffer is None or isinstance(buffer, int | np.integer):
        hint = f"; the order is update(buffer, {buffer})" if not isinstance(size, int | None) else ""
        raise ArgumentError(f"buffer must be a replay buffer or a batch, got {buffer!r}{hint}")
    if isinstance(buffer, MultiAgentBatch):
        raise ArgumentError(
            "buffer must have the steps of one policy, got a MultiAgentBatch; pass batch['policy_id'], or use an "
            "algorithm for several policies such as MultiAgentOnPolicyAlgorithm"
        )


def require_steps(count: int) -> None:
    """Raise EmptyBufferError if there are no steps to learn from."""
    if not count:
        raise EmptyBufferError("buffer must have steps to learn from, got none; collect some first")


class OnPolicyAlgorithm(Algorithm[PolicyT], ABC):
    """Base class of on-policy algorithms, which learn from all steps that the current policy collected.

    Attributes
    ----------
    allows_stale_steps
        Whether the algorithm corrects for steps that earlier policies collected, so that workers may collect during
        updates (`overlap` of `OnPolicyTrainerParams`). Other algorithms assume that the current policy collected all
        steps.
    """

    allows_stale_steps: bool = False

    def create_trainer(self, params: trainer.OnPolicyTrainerParams) -> trainer.OnPolicyTrainer:
        """Create a trainer of the algorithm."""
        return trainer.OnPolicyTrainer(self, params)

    def _postprocess_batch(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> None:
        super()._postprocess_batch(batch, buffer, indices)
        # After the gradient steps: the behaviour policy and the updated policy use the same normalization.
        if isinstance(self.policy, Policy):
            self.policy.update_statistics(batch)

    def update(self, buffer: Any, batch_size: int | None = None, repeat: int = 1) -> TrainingStats:
        """Update the policy with all steps of a buffer or batch.

        Parameters
        ----------
        buffer
            A replay buffer; or a `SampleBatch` or `Batch` that contains one episode after the other, each in time
            order.
        batch_size, repeat
            Steps per minibatch (None for all), and number of passes over the steps.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        ArgumentError
            If `buffer` is not a replay buffer or a batch of one policy.

        Examples
        --------
        >>> from gymnasium import spaces
        >>> from samplebatch import Collector
        >>> from samplebatch.learn import (
        ...     PPO,
        ...     AdamOptimizerFactory,
        ...     DiscreteActorPolicy,
        ...     DiscreteCritic,
        ...     Net,
        ... )
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
        """Iterate once over shuffled minibatches of the selected columns.

        The order is drawn from torch's default generator. An incomplete last minibatch is merged into the previous
        minibatch.
        """
        # One gather per pass: minibatches are views of the shuffled rows.
        shuffled: Batch = Batch({name: batch[name] for name in columns})[torch.randperm(len(batch))]
        yield from shuffled.split(batch_size or len(batch), shuffle=False, merge_last=True)


class _SamplingAlgorithm(Algorithm[PolicyT], ABC):
    augment: Callable[[Any], Any] | None = None
    """Augmentation of sampled observations and next observations, such as `RandomShift`; None for no augmentation."""

    def __init__(self, *, policy: PolicyT, allow_nonfinite: bool = False) -> None:
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        self._added_rows = AddedRows()

    def update(self, buffer: Any, sample_size: int | None = None) -> TrainingStats:
        """Update the policy with sampled rows of a buffer, or with all rows of a batch.

        Parameters
        ----------
        buffer
            A replay buffer, a client of a replay service, or a source of single steps: a `Dataset`, `MixedSampler`,
            `SampleBatch` or `Batch`.
        sample_size
            Number of rows, see `ReplayBuffer.sample`: None for all rows in random order, 0 for all rows in time order.
            A batch is always used in full.

        Raises
        ------
        EmptyBufferError
            If there are no rows.
        ArgumentError
            If `buffer` is not a buffer or a batch of one policy, a `sample_size` is passed for a batch, or the
            algorithm requires rows of several steps, but the rows of a dataset or batch are single steps.
        ColumnNotFoundError
            If rows of a dataset or batch lack a column that targets require.
        """
        require_source(buffer, sample_size)
        if isinstance(buffer, SampleBatch | Batch):
            if sample_size:
                raise ArgumentError(f"sample_size must be None for a batch, which is used in full, got {sample_size}")
            require_steps(len(buffer))
        return self._update(buffer, sample_size, self._update_with_batch)

    def _sample_batch(self, buffer: Any, sample_size: int | None) -> tuple[Batch, Any]:
        if isinstance(buffer, ReplayBuffer | ReplayClient):
            batch, indices = super()._sample_batch(buffer, sample_size)
        else:
            batch, indices = sample_steps(buffer, sample_size, **self._sample_options())
        if isinstance(self.policy, Policy) and self.policy.obs_rms is not None:
            if not isinstance(buffer, ReplayBuffer):
                self.policy.update_statistics(batch)
            elif len(added := self._added_rows.take(buffer)):
                self.policy.update_statistics(node(Batch, {"obs": buffer.get(added, "obs")}))
        if self.augment is not None:
            for name in ("obs", "obs_next"):
                if name in batch:
                    batch[name] = self.augment(batch[name])
        return batch, indices

    def get_extra_state(self) -> dict[str, Any]:
        return super().get_extra_state() | {"added_rows": self._added_rows.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        super().set_extra_state(state)
        self._added_rows.load_state_dict(state.get("added_rows"))

    @abstractmethod
    def _update_with_batch(self, batch: Batch) -> TrainingStats:
        """Perform a gradient step on a batch."""


class OffPolicyAlgorithm(_SamplingAlgorithm[PolicyT], ABC):
    """Base class of off-policy algorithms, which sample from a replay buffer that collectors extend.

    Attributes
    ----------
    augment
        Augmentation of sampled observations and next observations, such as `RandomShift`; None for no augmentation.
    """

    def create_trainer(self, params: trainer.OffPolicyTrainerParams) -> trainer.OffPolicyTrainer:
        """Create a trainer of the algorithm."""
        return trainer.OffPolicyTrainer(self, params)


class OfflineAlgorithm(_SamplingAlgorithm[PolicyT], ABC):
    """Base class of offline algorithms, which learn from samples of existing data."""

    def process_buffer(self, buffer: Any) -> Any:
        """Return the source of rows for training; subclasses add the columns that they require.

        Parameters
        ----------
        buffer
            A replay buffer, `Dataset` or `MixedSampler`, which is returned unchanged; or a path: a dataset folder is
            opened, and Parquet files of other libraries are read into a replay buffer.

        Raises
        ------
        ArgumentError, FormatError, SampleBatchError, OSError
            As in `samplebatch.convert.experience.open_source`.
        """
        return open_source(buffer)

    def create_trainer(self, params: trainer.OfflineTrainerParams) -> trainer.OfflineTrainer:
        """Create a trainer of the algorithm."""
        return trainer.OfflineTrainer(self, params)
