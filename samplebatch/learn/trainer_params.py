"""Parameters of trainers, under the names that Tianshou 2 gives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy.typing as npt

from samplebatch.arguments import positive, whole
from samplebatch.errors import ArgumentError, near_names
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
        Called with epoch and environment steps before each collecting, to set an exploration rate for instance.
    test_fn
        Called with epoch and environment steps before each test.
    stop_fn
        Called with the best score of the tests; training ends where it returns True.
    compute_score_fn
        Returns the score of a test from its report; by default the mean return.
    save_best_fn
        Called with the algorithm where a test has the best score so far.
    save_checkpoint_fn
        Called with epoch, environment steps and update steps after every epoch's steps, to save anything.
    checkpoint_dir
        Folder in which the trainer keeps its own state, from which a run that was killed goes on exactly; None for no
        checkpoints. (See `save_checkpoint`.)
    checkpoint_interval
        Epochs from one checkpoint to the next.
    multi_agent_return_reduction
        Makes one return of each episode from the array of returns; for rewards of several parts or agents.
    logger
        A logger, or several, to tell figures to; Tianshou's can be given, too.
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
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_interval: int = 1
    multi_agent_return_reduction: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None = None
    logger: Any = None
    verbose: bool = True
    show_progress: bool = True

    def __new__(cls, **given: Any) -> Self:
        """Refuse names that are no parameters, before the dataclass would in its own words."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ArgumentError(f"{cls.__name__} have no parameter {unknown[0]!r}; {near_names(unknown[0], known)}")
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
        Who collects: a collector with a buffer, or `RolloutWorkers` with a buffer, which get the newest weights before
        they collect.
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

    Raises
    ------
    ArgumentError
        If not exactly one of the two amounts is given, the collector has no buffer, `test_in_training` lacks
        `test_collector` or `stop_fn`, or `overlap` lacks workers.
    """

    training_collector: Any
    collection_step_num_env_steps: int | None = 2048
    collection_step_num_episodes: int | None = None
    test_in_training: bool = False
    overlap: bool = False

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
        if self.overlap and not isinstance(self.training_collector, RolloutWorkers):
            found = type(self.training_collector).__name__
            raise ArgumentError(f"overlap must come with RolloutWorkers, got a {found}")


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
