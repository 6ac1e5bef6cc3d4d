"""Reports of trainers, under the names that Tianshou 2 gives them, and the counters that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samplebatch.rollout.collect_statistics import CollectStats, PrintedAsDict


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
        """Count on from those of another training."""
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
