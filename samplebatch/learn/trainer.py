"""Trainers: the loop of training for algorithms that learn on policy, off policy and offline."""

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

from samplebatch.arguments import check_names, positive, whole
from samplebatch.env.seeds import generators_state, load_generators
from samplebatch.errors import ArgumentError, NonFiniteLossError
from samplebatch.learn.checkpoint import save_checkpoint
from samplebatch.learn.policy import policy_within_training_step
from samplebatch.loggers.logger import RecentMeans, figures_of, make_display, short
from samplebatch.rollout.statistics import CollectStats, PrintedAsDict, SequenceSummaryStats
from samplebatch.storage.datasets.mixed_sampler import SourceState
from samplebatch.workers.rollouts import Rollouts, make_rollouts
from samplebatch.workers.workers import RolloutWorkers

_WHOLE = (
    "max_epochs",
    "epoch_num_steps",
    "test_step_num_episodes",
    "checkpoint_interval",
    "collection_step_num_env_steps",
    "collection_step_num_episodes",
    "batch_size",
    "update_step_num_repetitions",
)
"""Parameters that count things, from 1."""
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
"""Parameters of older versions of Tianshou, with their names here."""


@dataclass(kw_only=True)
class TrainerParams:
    """Parameters that every trainer has.

    Attributes
    ----------
    max_epochs
        Epochs to train for. One has `epoch_num_steps` steps and then a test.
    epoch_num_steps
        Environment steps of an epoch, at least; of an `OfflineTrainer`, its updates.
    test_collector
        A collector that plays test episodes, no `RolloutWorkers`; None for no tests.
    test_step_num_episodes
        Episodes of a test.
    training_fn
        Called with epoch and environment steps before each collection, for example to set an exploration rate.
    test_fn
        Called with epoch and environment steps before each test.
    stop_fn
        Called with the best score of the tests; training ends when it returns True.
    compute_score_fn
        Returns the score of a test from its report; by default the mean return.
    save_best_fn
        Called with the algorithm when a test has the best score so far.
    save_checkpoint_fn
        Called with epoch, environment steps and update steps after an epoch's steps, to save anything: after every
        epoch, or as often as the first logger's `save_interval` says.
    resume_from_log
        Whether epochs, environment steps and update steps continue from those that the first logger recorded at the
        last `save_checkpoint_fn`. The caller loads what that function saved; `checkpoint_dir` restores everything.
    checkpoint_dir
        Folder in which the trainer keeps its own state, from which a run that was killed goes on exactly; None for no
        checkpoints. (See `save_checkpoint`.)
    checkpoint_interval
        Epochs from one checkpoint to the next.
    multi_agent_return_reduction
        Makes one return of each episode from the array of returns; for rewards of several parts or agents.
    logger
        One or several loggers, also Tianshou's.
    allow_nonfinite
        Whether to continue if a loss is NaN or infinite. By default the training stops there, unless the algorithm
        allows it.
    verbose
        Whether to print a line about each epoch and test.
    show_progress
        Whether to show a bar of progress, where there is a terminal and the extra `cli`.

    Raises
    ------
    ArgumentError
        If there is no such parameter; names the near ones. If a number is not positive, `test_collector` no collector,
        or a function for tests is given without one.
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
        """Reject unknown parameters with the near names."""
        check_names(cls, args, options, _RENAMED)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in _WHOLE:
            if (value := getattr(self, name, None)) is not None:
                setattr(self, name, whole(name, value, 1))
        collector = self.test_collector
        if collector is not None and not all(callable(getattr(collector, own, None)) for own in ("reset", "collect")):
            raise ArgumentError(f"test_collector must be a collector, got a {type(collector).__name__}")
        if collector is None:
            for name in ("stop_fn", "test_fn", "save_best_fn"):
                if getattr(self, name) is not None:
                    raise ArgumentError(f"{name} must be given with a test_collector, which is None")
        if self.resume_from_log and not (self.loggers and hasattr(self.loggers[0], "restore_data")):
            raise ArgumentError("resume_from_log must come with a logger that has restore_data")
        for logger in self.loggers:
            if not callable(getattr(logger, "log_info_data", None)):
                raise ArgumentError(f"logger must be a logger, or several, got a {type(logger).__name__}")

    @property
    def loggers(self) -> Sequence[Any]:
        """The loggers: none, one or several."""
        if self.logger is None:
            return ()
        return self.logger if isinstance(self.logger, Sequence) else (self.logger,)


@dataclass(kw_only=True)
class OnlineTrainerParams(TrainerParams):
    """Parameters of trainers that collect.

    Attributes
    ----------
    training_collector
        Collector or `RolloutWorkers` with a buffer; workers get the newest weights before each collection.
    collection_step_num_env_steps
        Environment steps to collect before each update, as `collect(n_step=...)` counts them.
    collection_step_num_episodes
        Episodes to collect, in place of steps.
    test_in_training
        Whether to test at once where the episodes that were collected fulfil `stop_fn`, and to end training if the test
        does as well.
    overlap
        Whether workers collect the next steps while the algorithm updates: they act by the weights of the update before
        then. Takes `RolloutWorkers`.
    asynchronous
        Whether workers collect by themselves, without waiting for each other or for updates: an update follows as soon
        as `collection_step_num_env_steps` steps have arrived from any of them. `max_lag` of the workers bounds how old
        the weights of these steps may be. Requires `RolloutWorkers`, or `RemoteActors` of a replay service.

    Raises
    ------
    ArgumentError
        If not exactly one of the two amounts is given, the collector has no buffer, `test_in_training` lacks
        `test_collector` or `stop_fn`, `overlap` or `asynchronous` lacks workers, both are true, or `asynchronous` comes
        with a number of episodes.
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
                "exactly one of collection_step_num_env_steps and collection_step_num_episodes must be given, got "
                f"{amounts[0]} and {amounts[1]}"
            )
        if self.test_in_training and (self.test_collector is None or self.stop_fn is None):
            raise ArgumentError("test_in_training must come with a test_collector and a stop_fn")
        if getattr(self.training_collector, "buffer", None) is None:
            raise ArgumentError("training_collector must have a buffer to learn from, it has none")
        if self.overlap and self.asynchronous:
            raise ArgumentError("one of overlap and asynchronous may be true, got both")
        source, kind = self.training_collector, type(self.training_collector).__name__
        if self.overlap and not isinstance(source, RolloutWorkers):
            raise ArgumentError(f"overlap must come with RolloutWorkers, got a {kind}")
        if self.asynchronous and not callable(getattr(source, "receive", None)):
            raise ArgumentError(f"asynchronous must come with RolloutWorkers or RemoteActors, got a {kind}")
        if not self.asynchronous and callable(getattr(source, "receive", None)) and not hasattr(source, "collect"):
            raise ArgumentError(f"asynchronous must be True for {kind}, whose actors collect by themselves")
        if self.asynchronous and self.collection_step_num_env_steps is None:
            raise ArgumentError("asynchronous must come with collection_step_num_env_steps, got a number of episodes")


@dataclass(kw_only=True)
class OnPolicyTrainerParams(OnlineTrainerParams):
    """Parameters of `OnPolicyTrainer`.

    Attributes
    ----------
    batch_size
        Rows of a gradient step; None for all that were collected.
    update_step_num_repetitions
        How often an update goes through all that was collected.

    Examples
    --------
    >>> from samplebatch import Collector, ReplayBuffer
    >>> params = OnPolicyTrainerParams(training_collector=Collector("random", "CartPole-v1", ReplayBuffer(100)))
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
        Rows that a gradient step draws from the buffer.
    update_step_num_gradient_steps_per_sample
        Gradient steps for each environment step that was collected, rounded over a collecting.
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
    buffer
        The rows to learn from; the algorithm's `process_buffer` sees them first.
    batch_size
        Rows that an update draws.
    """

    buffer: Any
    batch_size: int = 64


def require_finite_losses(figures: Mapping[str, float]) -> None:
    """Check the figures of an update whose names have `loss` in them.

    Raises
    ------
    NonFiniteLossError
        If one is NaN or infinite; names it.

    Examples
    --------
    >>> require_finite_losses({"critic/loss": 0.5, "kl": float("nan")})
    >>> require_finite_losses({"actor_loss": float("inf")})
    Traceback (most recent call last):
    samplebatch.errors.NonFiniteLossError: actor_loss must be finite, got inf
    """
    for name, value in figures.items():
        if not math.isfinite(value) and "loss" in name.rpartition("/")[2]:
            raise NonFiniteLossError(f"{name} must be finite, got {value}")


@dataclass(frozen=True, kw_only=True)
class TimingStats(PrintedAsDict):
    """Seconds of a training.

    Attributes
    ----------
    total_time
        From its beginning, pauses between its processes not counted.
    train_time
        Without the tests.
    train_time_collect, train_time_update
        Of collecting and of updates.
    test_time
        Of the tests.
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
    """Report on a training.

    Attributes
    ----------
    update_step
        Training steps: each is one collecting and its update; of an `OfflineTrainer`, its updates.
    best_score, best_reward, best_reward_std
        The best score of the tests, and the mean and standard deviation of returns in that test.
    train_step, train_episode, test_step, test_episode
        Environment steps and episodes of training and of tests.
    timing
        Where the time went.
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


@dataclass(frozen=True, kw_only=True)
class EpochStats(PrintedAsDict):
    """Report on an epoch.

    Attributes
    ----------
    epoch
        Its number, from 1.
    train_collect_stat, training_stat
        The reports of its last collecting and its last update; None if there was none.
    test_collect_stat
        The report of the test at its end; None if there was none.
    info_stat
        The training so far.
    """

    epoch: int
    train_collect_stat: CollectStats[Any] | None
    test_collect_stat: CollectStats[Any] | None
    training_stat: Any
    info_stat: InfoStats


@dataclass
class TrainingCounters:
    """Counters of a training, for its trainer and its checkpoints.

    Attributes
    ----------
    epoch
        Epochs that have begun.
    epoch_steps
        Steps of the newest one; None between two epochs.
    env_step, env_episode
        Environment steps and episodes; offline, the rows that were drawn.
    update_step
        Training steps.
    best_score, best_reward, best_reward_std, best_epoch
        The best test.
    test_step, test_episode
        Environment steps and episodes of tests.
    collect_s, update_s, test_s, total_s
        Seconds.
    is_stopped
        Whether training came to its end before `max_epochs`.
    """

    epoch: int = 0
    epoch_steps: int | None = None
    env_step: int = 0
    env_episode: int = 0
    update_step: int = 0
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
        """Report on the training so far.

        Parameters
        ----------
        train_step
            Environment steps of training.
        """
        train_s = self.total_s - self.test_s
        return InfoStats(
            update_step=self.update_step,
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
    """Report of one training step: the steps that it counts for, and whether training is done with it."""

    epoch_steps: int
    env_steps: int
    training_stats: Any = None
    collect_stats: CollectStats[Any] | None = None
    is_done: bool = False


class Trainer(ABC, Generic[ParamsT]):
    """Loop of training steps and tests over epochs: the base of trainers.

    Parameters
    ----------
    algorithm
        The algorithm, whose `update` a trainer calls.
    params
        How long, with which collectors, and what to do in between.

    Attributes
    ----------
    algorithm, params
        As given.
    counters
        Epochs, steps and seconds so far, and the best test.

    Raises
    ------
    ArgumentError
        If the parameters are those of another trainer.
    """

    _params_type: ClassVar[type[TrainerParams]] = TrainerParams

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
        self._seen_s = time.monotonic()

    # The loop

    def run(self, reset_collectors: bool = True, reset_collector_buffers: bool = False) -> InfoStats:
        """Train to the end: `max_epochs`, or until `stop_fn` says so or a stop is requested.

        A trainer that has loaded a state goes on from there; any other one begins with `reset`.

        Parameters
        ----------
        reset_collectors, reset_collector_buffers
            See `reset`.

        Returns
        -------
        InfoStats
            The report on all of it.

        Raises
        ------
        NonFiniteLossError
            If a loss is NaN or infinite, unless `allow_nonfinite`. The newest checkpoint is that of an epoch before.
        """
        self._seen_s = time.monotonic()
        try:
            if not self._is_resumed:
                self.reset(reset_collectors, reset_collector_buffers)
            self._is_resumed = False
            if self._stop_requested:
                # The first test took long.
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
        """Whether training has come to its end."""
        counters = self.counters
        return counters.is_stopped or (counters.epoch >= self.params.max_epochs and counters.epoch_steps is None)

    def request_stop(self) -> None:
        """Let `run` end after the training step under way; signal handlers may call this.

        The next `run` goes on from there, and so does a trainer that loads the state or checkpoint.
        """
        self._stop_requested = True

    def reset(self, reset_collectors: bool = True, reset_collector_buffers: bool = False) -> None:
        """Begin a training: set all counts to zero, reset the collectors, and test the policy as it is.

        Parameters
        ----------
        reset_collectors
            Whether the collectors' environments begin new episodes.
        reset_collector_buffers
            Whether their buffers are emptied as well.
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
        """Train for an epoch, or for the rest of one that was interrupted, test, and report on it."""
        counters, total = self.counters, self.params.epoch_num_steps
        if counters.epoch_steps is None:
            counters.epoch, counters.epoch_steps = counters.epoch + 1, 0
        self._display.begin(counters.epoch, counters.epoch_steps, total)
        if self._loaded_generators is not None:
            # Imports and displays may have drawn from them since.
            _load_generators(self._loaded_generators)
            self._loaded_generators = None
        step = TrainingStep(0, 0)
        while counters.epoch_steps < total and not (counters.is_stopped or self._stop_requested):
            step = self._train()
            counters.epoch_steps += step.epoch_steps
            self._display.advance(min(counters.epoch_steps, total), self._shown(step))
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
            for value in step.collect_stats.returns.tolist():
                self._returns.add({"return": value})
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
        # As in Tianshou, it is the best score that ends training, not that of the newest test.
        counters.is_stopped = self._is_enough(counters.best_score)
        return test

    @abstractmethod
    def _training_step(self) -> TrainingStep:
        """Collect and update, or update alone."""

    @abstractmethod
    def _env_steps(self) -> int:
        """Return the environment steps of training."""

    def info(self) -> InfoStats:
        """Report on the training so far."""
        now = time.monotonic()
        self.counters.total_s += now - self._seen_s
        self._seen_s = now
        return self.counters.info(self._env_steps())

    # Tests

    def _test(self, when: str, *, is_first: bool = False) -> CollectStats[Any]:
        params, counters = self.params, self.counters
        began = time.monotonic()
        params.test_collector.reset(reset_stats=False)
        if params.test_fn is not None:
            params.test_fn(counters.epoch, counters.env_step)
        stats = self._reduce(params.test_collector.collect(n_episode=params.test_step_num_episodes))
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
        counters.test_s += time.monotonic() - began
        self._display.say(
            f"{when}: test return {short(stats.returns_stat.mean)} ± {short(stats.returns_stat.std)}, "
            f"best {short(counters.best_reward)} in epoch {counters.best_epoch}"
        )
        return stats

    def _score(self, stats: CollectStats[Any]) -> float:
        if self.params.compute_score_fn is not None:
            return self.params.compute_score_fn(stats)
        return float("-inf") if stats.returns_stat is None else stats.returns_stat.mean

    def _is_enough(self, score: float) -> bool:
        return self.params.stop_fn is not None and bool(self.params.stop_fn(score))

    def _reduce(self, stats: CollectStats[Any]) -> CollectStats[Any]:
        if self.params.multi_agent_return_reduction is None or not stats.n_collected_episodes:
            return stats
        returns = self.params.multi_agent_return_reduction(stats.returns)
        return replace(stats, returns=returns, returns_stat=SequenceSummaryStats.from_sequence(returns))

    # Figures

    def _log(self, method: str, stats: Any, step: int) -> None:
        if self.params.loggers:
            figures = figures_of(stats)
            for logger in self.params.loggers:
                getattr(logger, method)(figures, step)

    def _note_update(self, stats: Any) -> None:
        """Count an update's time, smooth its losses, and tell loggers.

        Raises
        ------
        NonFiniteLossError
            If a loss is not finite, and neither the parameters nor the algorithm allow that.
        """
        figures = stats.get_loss_stats_dict()
        if not (self.params.allow_nonfinite or getattr(self.algorithm, "allow_nonfinite", False)):
            require_finite_losses(figures)
        stats.smoothed_loss = self._losses.add(figures)
        self.counters.update_s += stats.train_time
        self._log("log_update_data", stats, self.counters.update_step)

    def _shown(self, step: TrainingStep) -> dict[str, Any]:
        losses = {} if step.training_stats is None else step.training_stats.smoothed_loss
        shown: dict[str, Any] = {"updates": self.counters.update_step}
        if step.collect_stats is not None:
            shown["env steps"] = self.counters.env_step
            # Few collectings off policy see an episode end.
            if self._returns.values:
                shown["return"] = self._returns.mean("return")
        return shown | dict(list(losses.items())[:2])

    def _epoch_line(self, step: TrainingStep) -> str:
        shown = ", ".join(f"{name} {short(value)}" for name, value in self._shown(step).items())
        speed = self.info().timing.update_speed
        return f"epoch {self.counters.epoch}: {shown}" + (f", {speed:.0f} steps/s" if speed else "")

    # Resuming

    def _save_checkpoint(self) -> None:
        folder = self.params.checkpoint_dir
        is_due = self.counters.epoch % self.params.checkpoint_interval == 0 or self.is_done or self._stop_requested
        if folder is not None and is_due:
            save_checkpoint(self, folder)

    def _parts(self) -> dict[str, Any]:
        """Return the parts that have states of their own, by name; those with environments load pickles."""
        own: dict[str, Any] = {
            "algorithm": self.algorithm,
            "counters": self.counters,
            "losses": self._losses,
            "returns": self._returns,
        }
        loggers = {f"logger_{place}": logger for place, logger in enumerate(self.params.loggers)}
        return own | {name: logger for name, logger in loggers.items() if hasattr(logger, "state_dict")}

    def _collectors(self) -> dict[str, Rollouts]:
        test = self.params.test_collector
        return {} if test is None else {"test_collector": make_rollouts(test, None)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training between two training steps, for `load_state_dict`.

        It has the algorithm with its optimizers, the counters, the collectors with their environments, the buffer, and
        the generators of `random`, `numpy.random` and torch.

        Returns
        -------
        dict
            Plain values, arrays and tensors, and `why_reset`: why environments will be reset, None if they go on.
        """
        collectors = {name: own.state_dict() for name, own in self._collectors().items()}
        self.info()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "trainer": type(self).__name__,
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "collectors": collectors,
            "why_reset": next((why for own in collectors.values() if (why := own.get("why_reset"))), None),
            "generators": generators_state() | {"cuda": cuda},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Go on where a trainer was that was made with the same algorithm and parameters; `run` continues from there.

        Parameters
        ----------
        state
            What `state_dict` returned.
        allow_pickle
            Whether environments in it may be unpickled, which runs code that the state's writer chose.

        Raises
        ------
        ArgumentError
            If it is of another kind of trainer.
        UntrustedPickleError
            If there are environments in it, and `allow_pickle` is false.
        """
        if state["trainer"] != type(self).__name__:
            raise ArgumentError(f"the state must be of a {type(self).__name__}, got one of a {state['trainer']}")
        for name, own in self._collectors().items():
            own.load_state_dict(state["collectors"][name], allow_pickle=allow_pickle)
        for name, part in self._parts().items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])
        self._loaded_generators = state["generators"]
        _load_generators(self._loaded_generators)
        self._is_resumed = True
        self._seen_s = time.monotonic()


def _load_generators(state: Mapping[str, Any]) -> None:
    load_generators(state)
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


OnlineParamsT = TypeVar("OnlineParamsT", bound=OnlineTrainerParams)


class OnlineTrainer(Trainer[OnlineParamsT]):
    """Trainer that collects before each update: the base of `OnPolicyTrainer` and `OffPolicyTrainer`."""

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
        began = time.monotonic()
        if params.training_fn is not None:
            params.training_fn(counters.epoch, counters.env_step)
        stats = self.rollouts.collect(params.collection_step_num_env_steps, params.collection_step_num_episodes)
        if params.overlap and not self._is_last(stats):
            self.rollouts.begin(params.collection_step_num_env_steps, params.collection_step_num_episodes)
        counters.env_episode += stats.n_collected_episodes
        counters.collect_s += time.monotonic() - began
        return self._reduce(stats)

    def _is_last(self, stats: CollectStats[Any]) -> bool:
        counters, params = self.counters, self.params
        steps = (counters.epoch_steps or 0) + stats.n_collected_steps
        return counters.epoch >= params.max_epochs and steps >= params.epoch_num_steps

    def _passes_test(self, stats: CollectStats[Any]) -> bool:
        if not stats.n_collected_episodes or not self._is_enough(self._score(stats)):
            return False
        with policy_within_training_step(self.algorithm.policy, enabled=False):
            self._test(f"after {self.counters.env_step} steps")
        return self._is_enough(self.counters.best_score)

    @abstractmethod
    def _update(self, stats: CollectStats[Any]) -> Any:
        """Let the algorithm learn from the buffer."""

    def _env_steps(self) -> int:
        return self.counters.env_step

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"buffer": self.rollouts.buffer}

    def _collectors(self) -> dict[str, Rollouts]:
        return super()._collectors() | {"training_collector": self.rollouts}


class OnPolicyTrainer(OnlineTrainer[OnPolicyTrainerParams]):
    """Trainer for algorithms that learn from the newest policy's steps alone; the buffer is emptied after each update.

    Parameters
    ----------
    algorithm
        An algorithm with `policy` and `update(buffer=, batch_size=, repeat=)`.
    params
        How to train it.

    Raises
    ------
    ArgumentError
        If workers are to collect during updates, and the algorithm does not allow steps of earlier policies.
    """

    _params_type = OnPolicyTrainerParams

    def __init__(self, algorithm: Any, params: OnPolicyTrainerParams) -> None:
        super().__init__(algorithm, params)
        for name in ("overlap", "asynchronous"):
            if getattr(params, name) and not getattr(algorithm, "allows_stale_steps", False):
                raise ArgumentError(
                    f"{name} must be False for {type(algorithm).__name__}, whose allows_stale_steps is False: it takes "
                    "all steps for those of its newest policy"
                )

    def _update(self, stats: CollectStats[Any]) -> Any:
        params = self.params
        training = self.algorithm.update(
            buffer=self.rollouts.buffer, batch_size=params.batch_size, repeat=params.update_step_num_repetitions
        )
        self.rollouts.clear()
        self._note_update(training)
        return training


class OffPolicyTrainer(OnlineTrainer[OffPolicyTrainerParams]):
    """Trainer for algorithms that learn from samples of all that the buffer holds.

    Parameters
    ----------
    algorithm
        An algorithm with `policy` and `update(buffer=, sample_size=)`, one gradient step.
    params
        How to train it.
    """

    _params_type = OffPolicyTrainerParams

    def _update(self, stats: CollectStats[Any]) -> Any:
        ratio = self.params.update_step_num_gradient_steps_per_sample
        gradient_steps = round(ratio * stats.n_collected_steps)
        if not gradient_steps:
            raise ArgumentError(
                "update_step_num_gradient_steps_per_sample must bring a gradient step after each collecting, got "
                f"{ratio} for {stats.n_collected_steps} steps"
            )
        training = None
        for _ in range(gradient_steps):
            training = self.algorithm.update(buffer=self.rollouts.buffer, sample_size=self.params.batch_size)
            self._note_update(training)
        return training


class OfflineTrainer(Trainer[OfflineTrainerParams]):
    """Trainer for algorithms that learn from rows that are there already.

    Parameters
    ----------
    algorithm
        An algorithm with `policy`, `process_buffer(buffer)` and `update(buffer=, sample_size=)`, one gradient step.
    params
        How to train it.

    Raises
    ------
    ArgumentError
        If there are to be checkpoints, and the source of rows is another than a replay buffer, `Dataset` or
        `MixedSampler`, and has no `state_dict`.
    """

    _params_type = OfflineTrainerParams

    def __init__(self, algorithm: Any, params: OfflineTrainerParams) -> None:
        super().__init__(algorithm, params)
        self._buffer = algorithm.process_buffer(params.buffer)
        if params.checkpoint_dir is not None:
            # What no checkpoint can hold is found before hours of training, not after.
            SourceState(self._buffer)

    def _training_step(self) -> TrainingStep:
        training = self.algorithm.update(buffer=self._buffer, sample_size=self.params.batch_size)
        self._note_update(training)
        return TrainingStep(1, self.params.batch_size, training)

    def _env_steps(self) -> int:
        return 0

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"buffer": SourceState(self._buffer)}
