"""Trainers: training loops for on-policy, off-policy and offline algorithms."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy.typing as npt
import torch

from samplebatch.arguments import check_names, positive, suggest_names, whole
from samplebatch.env.seeds import generators_state, load_generators
from samplebatch.errors import ArgumentError, NonFiniteLossError
from samplebatch.learn.checkpoint import save_checkpoint
from samplebatch.learn.policy import policy_within_training_step
from samplebatch.loggers.logger import RecentMeans, make_display, metrics_of, short
from samplebatch.names import label_policies
from samplebatch.rollout.statistics import CollectStats, PrintedAsDict, SequenceSummaryStats
from samplebatch.storage.datasets.mixed_sampler import SourceState
from samplebatch.workers.workers import Rollouts, RolloutWorkers, make_rollouts

_COUNTS = (
    "max_epochs",
    "epoch_num_steps",
    "test_step_num_episodes",
    "checkpoint_interval",
    "collection_step_num_env_steps",
    "collection_step_num_episodes",
    "batch_size",
    "update_step_num_repetitions",
)
"""Parameters that must be whole numbers from 1."""
_RENAMED = {
    "max_epoch": "max_epochs",
    "num_epochs": "max_epochs",
    "step_per_epoch": "epoch_num_steps",
    "update_per_epoch": "epoch_num_steps",
    "train_collector": "training_collector",
    "collector": "training_collector",
    "step_per_collect": "collection_step_num_env_steps",
    "collect_per_step": "collection_step_num_env_steps",
    "episode_per_collect": "collection_step_num_episodes",
    "episode_per_test": "test_step_num_episodes",
    "update_per_step": "update_step_num_gradient_steps_per_sample",
    "repeat_per_collect": "update_step_num_repetitions",
    "train_fn": "training_fn",
    "save_fn": "save_best_fn",
    "reward_metric": "multi_agent_return_reduction",
}
"""Parameter names of older Tianshou versions, with the current names."""


@dataclass(kw_only=True)
class TrainerParams:
    """Parameters of all trainers.

    Attributes
    ----------
    max_epochs
        Number of epochs. An epoch consists of `epoch_num_steps` steps and a test.
    epoch_num_steps
        Minimum number of environment steps per epoch; for an `OfflineTrainer`, number of updates.
    test_collector, test_step_num_episodes
        Collector of test episodes (not `RolloutWorkers`; None for no tests), and number of episodes per test.
    training_fn, test_fn
        Functions that are called with epoch and environment steps: `training_fn` before each collection, and `test_fn`
        before each test, for example to set exploration.
    stop_fn
        Function of the best test score; training stops when the function returns True.
    compute_score_fn
        Function from the statistics of a test to the test score; by default, the mean return.
    save_best_fn
        Function that is called with the algorithm when a test improves the best score.
    save_checkpoint_fn
        Function that is called with epoch, environment steps and update steps after the last training step of an epoch:
        after every epoch, or at the `save_interval` of the first logger.
    resume_from_log
        Whether epochs, environment steps and update steps continue from the values that the first logger recorded at
        the last call to `save_checkpoint_fn`. The caller restores all other state; checkpoints in `checkpoint_dir`
        contain the complete state.
    checkpoint_dir, checkpoint_interval
        Folder for checkpoints of the trainer (None for no checkpoints; see `save_checkpoint`), and number of epochs
        between checkpoints. A killed run resumes exactly from a checkpoint.
    multi_agent_return_reduction
        Function that reduces the array of returns to one return per episode, for rewards with several components or
        agents.
    logger
        One logger or several; Tianshou's loggers are accepted.
    allow_nonfinite
        Whether training continues after a NaN or infinite loss. By default, training stops after a NaN or infinite loss
        unless the algorithm's `allow_nonfinite` is true.
    verbose, show_progress
        Whether to print a line per epoch and test, and the progress within an epoch: a progress bar on a terminal with
        the extra `cli`, otherwise a line every ten seconds.

    Raises
    ------
    ArgumentError
        If a parameter is unknown, a number is not positive, `test_collector` is not a collector, or a test function is
        passed without `test_collector`.
    """

    max_epochs: int = 100
    epoch_num_steps: int = 30000
    test_collector: Any = None
    test_step_num_episodes: int = 1
    training_fn: Callable[[int, int], None] | None = None
    test_fn: Callable[[int, int], None] | None = None
    stop_fn: Callable[[float], bool] | None = None
    compute_score_fn: Callable[[Any], float] | None = None
    save_best_fn: Callable[[Any], None] | None = None
    save_checkpoint_fn: Callable[[int, int, int], Any] | None = None
    resume_from_log: bool = False
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_interval: int = 1
    multi_agent_return_reduction: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None
    logger: Any = None
    allow_nonfinite: bool = False
    verbose: bool = True
    show_progress: bool = True

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Reject unknown parameters; the error suggests similar names."""
        check_names(cls, args, options, _RENAMED)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if (value := getattr(self, name, None)) is not None:
                setattr(self, name, whole(name, value, 1))
        collector = self.test_collector
        if collector is not None and not all(callable(getattr(collector, name, None)) for name in ("reset", "collect")):
            raise ArgumentError(f"test_collector must be a collector, got a {type(collector).__name__}")
        if collector is None:
            for name in ("stop_fn", "test_fn", "save_best_fn"):
                if getattr(self, name) is not None:
                    raise ArgumentError(f"test_collector must be a collector for {name}, got None")
        if self.resume_from_log and not (self.loggers and hasattr(self.loggers[0], "restore_data")):
            raise ArgumentError(f"logger must have restore_data for resume_from_log, got {self.logger!r}")
        for logger in self.loggers:
            if not callable(getattr(logger, "log_info_data", None)):
                raise ArgumentError(f"logger must be a logger, or several, got a {type(logger).__name__}")

    @property
    def loggers(self) -> Sequence[Any]:
        """Sequence of the loggers in `logger`; empty if `logger` is None."""
        if self.logger is None:
            return ()
        return self.logger if isinstance(self.logger, Sequence) else (self.logger,)


@dataclass(kw_only=True)
class OnlineTrainerParams(TrainerParams):
    """Parameters of trainers that collect.

    Attributes
    ----------
    training_collector
        Collector or `RolloutWorkers` with a buffer; workers receive the newest weights before each collection.
    collection_step_num_env_steps, collection_step_num_episodes
        Number of environment steps, counted as in `collect(n_step=...)`, or of episodes to collect before each update.
    test_in_training
        Whether to test immediately if the collected episodes satisfy `stop_fn`, and to stop training if the test also
        satisfies `stop_fn`.
    overlap
        Whether workers collect the next steps during an update, with the weights of the previous update. Requires
        `RolloutWorkers`.
    asynchronous
        Whether workers collect without waiting for each other or for updates: an update starts when
        `collection_step_num_env_steps` steps have arrived from any workers. The workers' `max_lag` limits the age of
        the weights with which workers collect. Requires `RolloutWorkers`, or `RemoteActors` of a replay service.

    Raises
    ------
    ArgumentError
        If both or neither of the two collection amounts are passed, the collector has no buffer, `test_in_training` is
        true without `test_collector` or `stop_fn`, `overlap` or `asynchronous` is true without workers, `overlap` and
        `asynchronous` are both true, or `asynchronous` is combined with a number of episodes.
    """

    training_collector: Any
    collection_step_num_env_steps: int | None = 2048
    collection_step_num_episodes: int | None = None
    test_in_training: bool = False
    overlap: bool = False
    asynchronous: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        amounts = (self.collection_step_num_env_steps, self.collection_step_num_episodes)
        if amounts.count(None) != 1:
            raise ArgumentError(
                "exactly one of collection_step_num_env_steps and collection_step_num_episodes must be passed, got "
                f"{amounts[0]} and {amounts[1]}; to collect episodes, set collection_step_num_env_steps=None, too"
            )
        if self.test_in_training and (self.test_collector is None or self.stop_fn is None):
            raise ArgumentError("test_collector and stop_fn must be passed for test_in_training, got None")
        if getattr(self.training_collector, "buffer", None) is None:
            raise ArgumentError("training_collector must have a buffer to learn from, got None")
        if self.overlap and self.asynchronous:
            raise ArgumentError("overlap must be False with asynchronous=True, got True")
        source, kind = self.training_collector, type(self.training_collector).__name__
        if self.overlap and not isinstance(source, RolloutWorkers):
            raise ArgumentError(f"training_collector must be RolloutWorkers for overlap, got a {kind}")
        if self.asynchronous and not callable(getattr(source, "receive", None)):
            raise ArgumentError(
                f"training_collector must be RolloutWorkers or RemoteActors for asynchronous, got a {kind}"
            )
        if not self.asynchronous and callable(getattr(source, "receive", None)) and not hasattr(source, "collect"):
            raise ArgumentError(f"asynchronous must be True for {kind}, whose actors collect independently, got False")
        if self.asynchronous and self.collection_step_num_env_steps is None:
            raise ArgumentError("collection_step_num_env_steps must be passed for asynchronous, got None")


@dataclass(kw_only=True)
class OnPolicyTrainerParams(OnlineTrainerParams):
    """Parameters of `OnPolicyTrainer`.

    Attributes
    ----------
    batch_size, update_step_num_repetitions
        Number of rows per gradient step (None for all collected rows), and number of passes over the collected rows.

    Examples
    --------
    >>> from samplebatch import Collector, ReplayBuffer
    >>> params = OnPolicyTrainerParams(
    ...     training_collector=Collector("random", "CartPole-v1", ReplayBuffer(100))
    ... )
    >>> params.collection_step_num_env_steps, params.batch_size
    (2048, 64)
    """

    batch_size: int | None = 64
    update_step_num_repetitions: int = 1


@dataclass(kw_only=True)
class OffPolicyTrainerParams(OnlineTrainerParams):
    """Parameters of `OffPolicyTrainer`.

    Attributes
    ----------
    batch_size
        Number of rows sampled from the buffer per gradient step.
    update_step_num_gradient_steps_per_sample
        Number of gradient steps per collected environment step; the number of gradient steps per collection is rounded.
    """

    batch_size: int = 64
    update_step_num_gradient_steps_per_sample: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "update_step_num_gradient_steps_per_sample"
        positive(name, getattr(self, name))


@dataclass(kw_only=True)
class OfflineTrainerParams(TrainerParams):
    """Parameters of `OfflineTrainer`.

    Attributes
    ----------
    buffer, batch_size
        Source of the rows, which is passed to the algorithm's `process_buffer`, and number of rows sampled per update.
    """

    buffer: Any
    batch_size: int = 64


def require_finite_losses(metrics: Mapping[str, float]) -> None:
    """Require finite values of all metrics whose names contain `loss`.

    Raises NonFiniteLossError if a loss is NaN or infinite.

    >>> require_finite_losses({"critic/loss": 0.5, "kl": float("nan")})
    >>> require_finite_losses({"actor_loss": float("inf")})
    Traceback (most recent call last):
    samplebatch.errors.NonFiniteLossError: actor_loss must be finite, got inf
    """
    for name, value in metrics.items():
        if not math.isfinite(value) and "loss" in name.rpartition("/")[2]:
            raise NonFiniteLossError(f"{name} must be finite, got {value}")


@dataclass(frozen=True, kw_only=True)
class TimingStats(PrintedAsDict):
    """Durations of the phases of a training run, in seconds.

    Attributes
    ----------
    total_time, train_time
        Duration of training, excluding the pause between an interruption and the resumption of the run; and this
        duration minus `test_time`.
    train_time_collect, train_time_update, test_time
        Durations of collections, updates and tests.
    update_speed
        Environment steps per second of `train_time`.
    """

    total_time: float = 0.0
    train_time: float = 0.0
    train_time_collect: float = 0.0
    train_time_update: float = 0.0
    test_time: float = 0.0
    update_speed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class InfoStats(PrintedAsDict):
    """Summary of a training run.

    Attributes
    ----------
    update_step
        Training steps. A training step consists of a collection and an update; for an `OfflineTrainer`, of an update.
    gradient_step
        Gradient steps of all updates.
    best_score, best_reward, best_reward_std
        Best test score, and the mean and standard deviation of the returns in that test.
    train_step, train_episode, test_step, test_episode, timing
        Environment steps and episodes of training and tests, and durations.
    """

    update_step: int
    best_score: float
    best_reward: float
    best_reward_std: float
    train_step: int
    train_episode: int
    test_step: int
    test_episode: int
    timing: TimingStats
    gradient_step: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochStats(PrintedAsDict):
    """Summary of an epoch.

    Attributes
    ----------
    epoch, info_stat
        Epoch number, counted from 1, and summary of the training run so far.
    train_collect_stat, training_stat, test_collect_stat
        Statistics of the last collection, of the last update, and of the test after the epoch; None if there are no
        statistics.
    """

    epoch: int
    train_collect_stat: CollectStats[Any] | None
    test_collect_stat: CollectStats[Any] | None
    training_stat: Any
    info_stat: InfoStats


@dataclass
class TrainingCounters:
    """Counters of a training run, which are part of the run's checkpoints.

    epoch, epoch_steps: epochs started, and steps of the current epoch; None between epochs.
    env_step, env_episode, update_step, gradient_step: environment steps (offline: sampled rows), episodes, training
        steps and gradient steps.
    best_score, best_reward, best_reward_std, best_epoch: results of the best test.
    test_step, test_episode: environment steps and episodes of tests.
    collect_s, update_s, test_s, total_s: durations in seconds.
    is_stopped: whether training stopped before `max_epochs`.
    """

    epoch: int = 0
    epoch_steps: int | None = None
    env_step: int = 0
    env_episode: int = 0
    update_step: int = 0
    gradient_step: int = 0
    best_score: float = 0.0
    best_reward: float = 0.0
    best_reward_std: float = 0.0
    best_epoch: int = 0
    test_step: int = 0
    test_episode: int = 0
    collect_s: float = 0.0
    update_s: float = 0.0
    test_s: float = 0.0
    total_s: float = 0.0
    is_stopped: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters by name, for `load_state_dict`."""
        return vars(self).copy()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore counters from `state_dict`."""
        vars(self).update(state)

    def info(self, train_step: int) -> InfoStats:
        """Summarize the training run so far; `train_step` is the number of environment steps of training."""
        train_s = self.total_s - self.test_s
        return InfoStats(
            update_step=self.update_step,
            gradient_step=self.gradient_step,
            best_score=self.best_score,
            best_reward=self.best_reward,
            best_reward_std=self.best_reward_std,
            train_step=train_step,
            train_episode=self.env_episode,
            test_step=self.test_step,
            test_episode=self.test_episode,
            timing=TimingStats(
                total_time=self.total_s,
                train_time=train_s,
                train_time_collect=self.collect_s,
                train_time_update=self.update_s,
                test_time=self.test_s,
                update_speed=train_step / train_s if train_s > 0 else 0.0,
            ),
        )


ParamsT = TypeVar("ParamsT", bound=TrainerParams)


@dataclass(frozen=True)
class TrainingStep:
    """Result of a training step: its steps and statistics, and whether this step completes training."""

    epoch_steps: int
    env_steps: int
    training_stats: Any = None
    collect_stats: CollectStats[Any] | None = None
    is_done: bool = False


class Trainer(ABC, Generic[ParamsT]):
    """Base class of trainers: the loop of training steps and tests over epochs.

    Parameters
    ----------
    algorithm, params
        The algorithm, and the parameters of the training run; also attributes.

    Attributes
    ----------
    counters
        Epochs, steps and seconds so far, and the best test.

    Raises
    ------
    ArgumentError
        If `params` is not of the class that this trainer requires.
    """

    _params_type: ClassVar[type[TrainerParams]] = TrainerParams

    @suggest_names()
    def __init__(self, algorithm: Any, params: ParamsT) -> None:
        if not isinstance(params, self._params_type):
            raise ArgumentError(
                f"params must be {self._params_type.__name__} for {type(self).__name__}, got {type(params).__name__}"
            )
        self.algorithm, self.params = algorithm, params
        if params.allow_nonfinite and hasattr(algorithm, "allow_nonfinite"):
            algorithm.allow_nonfinite = True
        self.counters = TrainingCounters()
        self._losses, self._returns = RecentMeans(), RecentMeans()
        self._display = make_display(verbose=params.verbose, show_progress=params.show_progress)
        self._is_resumed = self._stop_requested = False
        self._loaded_generators: Mapping[str, Any] | None = None
        self._last_time_s = time.monotonic()

    # The loop

    def run(self, reset_collectors: bool = True, reset_collector_buffers: bool = False) -> InfoStats:
        """Train for `max_epochs` epochs, or until `stop_fn` returns True or a stop is requested; return a summary.

        Continues from a loaded state. If no state was loaded, `reset` is called first, with the arguments of `run`.

        Raises
        ------
        NonFiniteLossError
            If a loss is NaN or infinite, and `allow_nonfinite` is false. The newest checkpoint is older than the
            current epoch.
        """
        self._last_time_s = time.monotonic()
        try:
            if not self._is_resumed:
                self.reset(reset_collectors, reset_collector_buffers)
            self._is_resumed = False
            if self._stop_requested:
                # The stop was requested during the first test.
                self._save_checkpoint()
            while not (self.is_done or self._stop_requested):
                self.execute_epoch()
                self._save_checkpoint()
        finally:
            self._display.close()
            for logger in self.params.loggers:
                if hasattr(logger, "flush"):
                    logger.flush()
        self._is_resumed = self._stop_requested
        self._stop_requested = False
        return self.info()

    @property
    def is_done(self) -> bool:
        """Whether training is complete."""
        counters = self.counters
        return counters.is_stopped or (counters.epoch >= self.params.max_epochs and counters.epoch_steps is None)

    def request_stop(self) -> None:
        """Request that `run` returns after the current training step; safe to call from signal handlers.

        The next call to `run` resumes after this training step, as does a trainer that loads the state or checkpoint.
        """
        self._stop_requested = True

    def reset(self, reset_collectors: bool = True, reset_collector_buffers: bool = False) -> None:
        """Start a training run: reset counters and collectors, and test the initial policy.

        `reset_collectors` starts new episodes; `reset_collector_buffers` also clears the collectors' buffers.
        """
        self.counters = TrainingCounters()
        self._losses, self._returns = RecentMeans(), RecentMeans()
        if reset_collectors:
            for rollouts in self._collectors().values():
                rollouts.reset(reset_buffer=reset_collector_buffers)
        if self.params.resume_from_log:
            counters = self.counters
            counters.epoch, counters.env_step, counters.update_step = self.params.loggers[0].restore_data()
        if self.params.test_collector is not None:
            self._test("before training", is_first=True)

    def execute_epoch(self) -> EpochStats:
        """Train for an epoch, or complete an interrupted epoch; then test the policy, and return a summary."""
        counters, total = self.counters, self.params.epoch_num_steps
        if counters.epoch_steps is None:
            counters.epoch, counters.epoch_steps = counters.epoch + 1, 0
        self._display.begin(counters.epoch, counters.epoch_steps, total)
        if self._loaded_generators is not None:
            # Imports and displays may have drawn random numbers since the state was loaded.
            _load_generators(self._loaded_generators)
            self._loaded_generators = None
        step = TrainingStep(0, 0)
        while counters.epoch_steps < total and not (counters.is_stopped or self._stop_requested):
            step = self._train()
            counters.epoch_steps += step.epoch_steps
            self._display.advance(min(counters.epoch_steps, total), self._display_values(step))
        test = None
        is_interrupted = counters.epoch_steps < total and not counters.is_stopped
        if not is_interrupted:
            counters.epoch_steps = None
            self._display.say(self._epoch_line(step))
            test = None if counters.is_stopped else self._end_epoch()
        info = self.info()
        if not is_interrupted:
            self._log("log_info_data", info, counters.epoch)
        return EpochStats(
            epoch=counters.epoch,
            train_collect_stat=step.collect_stats,
            test_collect_stat=test,
            training_stat=step.training_stats,
            info_stat=info,
        )

    def _train(self) -> TrainingStep:
        counters = self.counters
        counters.update_step += 1
        with policy_within_training_step(self.algorithm.policy):
            step = self._training_step()
        counters.env_step += step.env_steps
        counters.is_stopped = step.is_done
        if step.collect_stats is not None:
            self._record_returns(step.collect_stats)
            self._log("log_training_data", step.collect_stats, counters.env_step)
        return step

    def _end_epoch(self) -> CollectStats[Any] | None:
        counters = self.counters
        if (save := self.params.save_checkpoint_fn) is not None:
            logger: Any = self.params.loggers[0] if self.params.loggers else None
            if hasattr(logger, "save_data"):
                logger.save_data(counters.epoch, counters.env_step, counters.update_step, save)
            else:
                save(counters.epoch, counters.env_step, counters.update_step)
        if self.params.test_collector is None:
            return None
        test = self._test(f"epoch {counters.epoch}")
        # As in Tianshou, stop_fn is evaluated on the best score, not on the score of the newest test.
        counters.is_stopped = self._should_stop(counters.best_score)
        return test

    @abstractmethod
    def _training_step(self) -> TrainingStep:
        """Perform a training step: collect if the trainer is online, and update."""

    @abstractmethod
    def _env_steps(self) -> int:
        """Return the number of environment steps of training."""

    def info(self) -> InfoStats:
        """Summarize the training run so far."""
        now = time.monotonic()
        self.counters.total_s += now - self._last_time_s
        self._last_time_s = now
        return self.counters.info(self._env_steps())

    # Tests

    def _test(self, when: str, *, is_first: bool = False) -> CollectStats[Any]:
        params, counters = self.params, self.counters
        start = time.monotonic()
        params.test_collector.reset(reset_stats=False)
        if params.test_fn is not None:
            params.test_fn(counters.epoch, counters.env_step)
        stats = self._reduce_returns(params.test_collector.collect(n_episode=params.test_step_num_episodes))
        self._log("log_test_data", stats, counters.env_step)
        score = self._score(stats)
        assert stats.returns_stat is not None
        if is_first or score > counters.best_score or (isnan(counters.best_score) and not isnan(score)):
            counters.best_score, counters.best_epoch = score, counters.epoch
            counters.best_reward, counters.best_reward_std = stats.returns_stat.mean, stats.returns_stat.std
            if params.save_best_fn is not None:
                params.save_best_fn(self.algorithm)
        counters.test_step += stats.n_collected_steps
        counters.test_episode += stats.n_collected_episodes
        counters.test_s += time.monotonic() - start
        self._display.say(
            f"{when}: test return {short(stats.returns_stat.mean)} ± {short(stats.returns_stat.std)}, "
            f"best {short(counters.best_reward)} in epoch {counters.best_epoch}"
        )
        return stats

    def _score(self, stats: CollectStats[Any]) -> float:
        if self.params.compute_score_fn is not None:
            return self.params.compute_score_fn(stats)
        return float("-inf") if stats.returns_stat is None else stats.returns_stat.mean

    def _should_stop(self, score: float) -> bool:
        return self.params.stop_fn is not None and bool(self.params.stop_fn(score))

    def _reduce_returns(self, stats: CollectStats[Any]) -> CollectStats[Any]:
        if self.params.multi_agent_return_reduction is None or not stats.n_collected_episodes:
            return stats
        returns = self.params.multi_agent_return_reduction(stats.returns)
        return replace(stats, returns=returns, returns_stat=SequenceSummaryStats.from_sequence(returns))

    # Metrics

    def _log(self, method: str, stats: Any, step: int) -> None:
        if self.params.loggers:
            metrics = metrics_of(stats)
            for logger in self.params.loggers:
                getattr(logger, method)(metrics, step)

    def _record_returns(self, stats: CollectStats[Any]) -> None:
        """Add returns of completed episodes to a moving average, or to one average per policy if there are several."""
        by_name = {"return": stats.returns}
        if len(stats.policies) > 1 and not self.params.multi_agent_return_reduction:
            labels = label_policies(stats.policies)
            by_name = {
                f"return {labels[policy]}": policy_stats.returns for policy, policy_stats in stats.policies.items()
            }
        for name, returns in by_name.items():
            for value in returns.tolist():
                self._returns.add({name: value})

    def _record_update(self, stats: Any) -> None:
        """Check losses unless `allow_nonfinite` is true; smooth the losses, and log an update's statistics."""
        metrics = stats.get_loss_stats_dict()
        if not (self.params.allow_nonfinite or getattr(self.algorithm, "allow_nonfinite", False)):
            require_finite_losses(metrics)
        stats.smoothed_loss = self._losses.add(metrics)
        self.counters.update_s += stats.train_time
        # Statistics of other libraries' algorithms may lack the number.
        self.counters.gradient_step += getattr(stats, "gradient_steps", 1)
        self._log("log_update_data", stats, self.counters.update_step)

    def _display_values(self, step: TrainingStep) -> dict[str, Any]:
        losses = {} if step.training_stats is None else step.training_stats.smoothed_loss
        values: dict[str, Any] = {"updates": self.counters.gradient_step}
        if step.collect_stats is not None:
            values["env steps"] = self.counters.env_step
            # Off policy, few collections contain the end of an episode.
            values |= {name: self._returns.mean(name) for name in self._returns.values}
        # Names such as walker/loss are of several policies, which are all shown.
        is_of_policies = any("/" in name for name in losses)
        loss_names = [name for name in losses if name.endswith("/loss")] if is_of_policies else list(losses)[:2]
        return values | {name: losses[name] for name in loss_names or list(losses)[:2]}

    def _epoch_line(self, step: TrainingStep) -> str:
        values = ", ".join(f"{name} {short(value)}" for name, value in self._display_values(step).items())
        speed = self.info().timing.update_speed
        return f"epoch {self.counters.epoch}: {values}" + (f", {speed:.0f} steps/s" if speed else "")

    # Resuming

    def _save_checkpoint(self) -> None:
        folder = self.params.checkpoint_dir
        is_due = self.counters.epoch % self.params.checkpoint_interval == 0 or self.is_done or self._stop_requested
        if folder is not None and is_due:
            save_checkpoint(self, folder)

    def _parts(self) -> dict[str, Any]:
        """Return the components that have a `state_dict`, keyed by name; collectors are excluded."""
        parts: dict[str, Any] = {
            "algorithm": self.algorithm,
            "counters": self.counters,
            "losses": self._losses,
            "returns": self._returns,
        }
        loggers = {f"logger_{index}": logger for index, logger in enumerate(self.params.loggers)}
        return parts | {name: logger for name, logger in loggers.items() if hasattr(logger, "state_dict")}

    def _collectors(self) -> dict[str, Rollouts]:
        test = self.params.test_collector
        return {} if test is None else {"test_collector": make_rollouts(test, None)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two training steps, for `load_state_dict`.

        The state contains the algorithm and its optimizers, the counters, the collectors and their environments, the
        buffer, and the generators of `random`, `numpy.random` and torch.

        The entry `why_reset` is the reason why the restored environments will be reset; None if their episodes
        continue.
        """
        collectors = {name: rollouts.state_dict() for name, rollouts in self._collectors().items()}
        self.info()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "trainer": type(self).__name__,
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "collectors": collectors,
            "why_reset": next((why for saved in collectors.values() if (why := saved.get("why_reset"))), None),
            "generators": generators_state() | {"cuda": cuda},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Restore the state of a trainer with this trainer's algorithm and parameters; `run` resumes from the state.

        Parameters
        ----------
        state
            Result of `state_dict`.
        allow_pickle
            Whether environments in the state may be unpickled; unpickling runs code chosen by the writer of the state.

        Raises
        ------
        ArgumentError
            If the state was saved by a trainer of a class other than this trainer's class.
        UntrustedPickleError
            If the state contains environments, and `allow_pickle` is false.
        """
        if state["trainer"] != type(self).__name__:
            raise ArgumentError(f"state must be from a {type(self).__name__}, got one from a {state['trainer']}")
        for name, rollouts in self._collectors().items():
            rollouts.load_state_dict(state["collectors"][name], allow_pickle=allow_pickle)
        for name, part in self._parts().items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])
        self._loaded_generators = state["generators"]
        _load_generators(self._loaded_generators)
        self._is_resumed = True
        self._last_time_s = time.monotonic()


def _load_generators(state: Mapping[str, Any]) -> None:
    load_generators(state)
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


OnlineParamsT = TypeVar("OnlineParamsT", bound=OnlineTrainerParams)


class OnlineTrainer(Trainer[OnlineParamsT]):
    """Base class of trainers that collect before each update."""

    @suggest_names()
    def __init__(self, algorithm: Any, params: OnlineParamsT) -> None:
        super().__init__(algorithm, params)
        self.rollouts: Rollouts = make_rollouts(
            params.training_collector, algorithm.policy, is_asynchronous=params.asynchronous
        )

    def _training_step(self) -> TrainingStep:
        stats = self._collect()
        is_done = self.params.test_in_training and self._passes_test(stats)
        training = None if is_done else self._update(stats)
        return TrainingStep(stats.n_collected_steps, stats.n_collected_steps, training, stats, is_done)

    def _collect(self) -> CollectStats[Any]:
        params, counters = self.params, self.counters
        start = time.monotonic()
        if params.training_fn is not None:
            params.training_fn(counters.epoch, counters.env_step)
        stats = self.rollouts.collect(params.collection_step_num_env_steps, params.collection_step_num_episodes)
        if params.overlap and not self._is_last_collection(stats):
            self.rollouts.begin(params.collection_step_num_env_steps, params.collection_step_num_episodes)
        counters.env_episode += stats.n_collected_episodes
        counters.collect_s += time.monotonic() - start
        return self._reduce_returns(stats)

    def _is_last_collection(self, stats: CollectStats[Any]) -> bool:
        counters, params = self.counters, self.params
        steps = (counters.epoch_steps or 0) + stats.n_collected_steps
        return counters.epoch >= params.max_epochs and steps >= params.epoch_num_steps

    def _passes_test(self, stats: CollectStats[Any]) -> bool:
        if not stats.n_collected_episodes or not self._should_stop(self._score(stats)):
            return False
        with policy_within_training_step(self.algorithm.policy, enabled=False):
            self._test(f"after {self.counters.env_step} steps")
        return self._should_stop(self.counters.best_score)

    @abstractmethod
    def _update(self, stats: CollectStats[Any]) -> Any:
        """Update the algorithm with the buffer; return the statistics of the update."""

    def _env_steps(self) -> int:
        return self.counters.env_step

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"buffer": self.rollouts.buffer}

    def _collectors(self) -> dict[str, Rollouts]:
        return super()._collectors() | {"training_collector": self.rollouts}


class OnPolicyTrainer(OnlineTrainer[OnPolicyTrainerParams]):
    """Trainer for on-policy algorithms; clears the buffer after each update.

    The algorithm must have the attributes `policy` and `update(buffer=, batch_size=, repeat=)`.

    Raises
    ------
    ArgumentError
        If `overlap` or `asynchronous` is true, and `allows_stale_steps` of the algorithm is false.
    """

    _params_type = OnPolicyTrainerParams

    @suggest_names()
    def __init__(self, algorithm: Any, params: OnPolicyTrainerParams) -> None:
        super().__init__(algorithm, params)
        for name in ("overlap", "asynchronous"):
            if getattr(params, name) and not getattr(algorithm, "allows_stale_steps", False):
                raise ArgumentError(
                    f"{name} must be False for {type(algorithm).__name__}, which treats all steps as collected by the "
                    "newest policy (allows_stale_steps is False), got True"
                )

    def _update(self, stats: CollectStats[Any]) -> Any:
        params = self.params
        training = self.algorithm.update(
            buffer=self.rollouts.buffer, batch_size=params.batch_size, repeat=params.update_step_num_repetitions
        )
        self.rollouts.clear()
        self._record_update(training)
        return training


class OffPolicyTrainer(OnlineTrainer[OffPolicyTrainerParams]):
    """Trainer that alternates between collecting steps into a replay buffer and learning from samples of the buffer.

    The algorithm must have the attributes `policy` and `update(buffer=, sample_size=)`; `update` performs one gradient
    step.
    """

    _params_type = OffPolicyTrainerParams

    def _update(self, stats: CollectStats[Any]) -> Any:
        ratio = self.params.update_step_num_gradient_steps_per_sample
        gradient_steps = round(ratio * stats.n_collected_steps)
        if not gradient_steps:
            raise ArgumentError(
                "update_step_num_gradient_steps_per_sample must yield at least one gradient step per collection, got "
                f"{ratio} for {stats.n_collected_steps} steps"
            )
        training = None
        for _ in range(gradient_steps):
            training = self.algorithm.update(buffer=self.rollouts.buffer, sample_size=self.params.batch_size)
            self._record_update(training)
        return training


class OfflineTrainer(Trainer[OfflineTrainerParams]):
    """Trainer that learns from samples of existing data and collects no steps.

    The algorithm must have the attributes `policy`, `process_buffer(buffer)` and `update(buffer=, sample_size=)`;
    `update` performs one gradient step.

    Raises
    ------
    ArgumentError
        If `checkpoint_dir` is passed, but the source of rows has no `state_dict` and is not a replay buffer, `Dataset`
        or `MixedSampler`.
    """

    _params_type = OfflineTrainerParams

    @suggest_names()
    def __init__(self, algorithm: Any, params: OfflineTrainerParams) -> None:
        super().__init__(algorithm, params)
        self._buffer = algorithm.process_buffer(params.buffer)
        if params.checkpoint_dir is not None:
            # Reject sources that cannot be checkpointed before training, not after.
            SourceState(self._buffer)

    def _training_step(self) -> TrainingStep:
        training = self.algorithm.update(buffer=self._buffer, sample_size=self.params.batch_size)
        self._record_update(training)
        return TrainingStep(1, self.params.batch_size, training)

    def _env_steps(self) -> int:
        return 0

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"buffer": SourceState(self._buffer)}
