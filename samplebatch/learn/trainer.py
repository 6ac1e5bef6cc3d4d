"""Trainers: the loop of training for algorithms that learn on policy, off policy and offline."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any, TypeVar

from samplebatch.errors import ArgumentError
from samplebatch.learn.policy import policy_within_training_step
from samplebatch.learn.trainer_params import (
    OfflineTrainerParams,
    OffPolicyTrainerParams,
    OnlineTrainerParams,
    OnPolicyTrainerParams,
)
from samplebatch.learn.training_loop import Trainer, TrainingStep
from samplebatch.rollout.collect_statistics import CollectStats
from samplebatch.storage.draws import rows_part
from samplebatch.workers.rollouts import Rollouts, make_rollouts

OnlineParamsT = TypeVar("OnlineParamsT", bound=OnlineTrainerParams)


class OnlineTrainer(Trainer[OnlineParamsT]):
    """Trainer that collects before each update: the base of `OnPolicyTrainer` and `OffPolicyTrainer`."""

    def __init__(self, algorithm: Any, params: OnlineParamsT) -> None:
        super().__init__(algorithm, params)
        self.rollouts: Rollouts = make_rollouts(params.training_collector, algorithm.policy)

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
        """Tell whether training ends with the steps of a report."""
        counters, params = self.counters, self.params
        steps = (counters.epoch_steps or 0) + stats.n_collected_steps
        return counters.epoch >= params.max_epochs and steps >= params.epoch_num_steps

    def _passes_test(self, stats: CollectStats[Any]) -> bool:
        """Test at once, if the episodes that ended are good enough; tell whether the test is as well."""
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
        if params.overlap and not getattr(algorithm, "allows_stale_steps", False):
            raise ArgumentError(
                f"overlap must be False for {type(algorithm).__name__}, whose allows_stale_steps is False: it takes "
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
            rows_part(self._buffer)

    def _training_step(self) -> TrainingStep:
        training = self.algorithm.update(buffer=self._buffer, sample_size=self.params.batch_size)
        self._note_update(training)
        return TrainingStep(1, self.params.batch_size, training)

    def _env_steps(self) -> int:
        return 0

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"buffer": rows_part(self._buffer)}
