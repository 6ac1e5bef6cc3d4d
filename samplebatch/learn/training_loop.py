"""Training loop: epochs of training steps with tests between them, the base of all trainers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from samplebatch.errors import ArgumentError
from samplebatch.learn.checkpoint import save_checkpoint
from samplebatch.learn.policy import policy_within_training_step
from samplebatch.learn.trainer_params import TrainerParams
from samplebatch.learn.trainer_stats import EpochStats, InfoStats, TrainingCounters
from samplebatch.loggers.display import make_display
from samplebatch.loggers.figures import RecentMeans, figures_of, short
from samplebatch.rollout.collect_statistics import CollectStats, SequenceSummaryStats
from samplebatch.workers.generators import generators_state, load_generators
from samplebatch.workers.rollouts import Rollouts, make_rollouts

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
        self.counters = TrainingCounters()
        self._losses, self._returns = RecentMeans(), RecentMeans()
        self._display = make_display(verbose=params.verbose, show_progress=params.show_progress)
        self._is_resumed = self._stop_requested = False
        self._seen_s = time.monotonic()

    # The loop

    def run(self, reset_collectors: bool = True, reset_collector_buffers: bool = False) -> InfoStats:
        """Train to the end: `max_epochs`, or until `stop_fn` says so or a stop is requested.

        A trainer that has loaded a state goes on from there; any other one begins with `reset`.

        Parameters
        ----------
        reset_collectors, reset_collector_buffers
            As `reset` takes them.

        Returns
        -------
        InfoStats
            The report on all of it.
        """
        self._seen_s = time.monotonic()
        try:
            if not self._is_resumed:
                self.reset(reset_collectors, reset_collector_buffers)
            self._is_resumed = False
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
        if self.params.test_collector is not None:
            self._test("before training", is_first=True)

    def execute_epoch(self) -> EpochStats:
        """Train for an epoch, or for the rest of one that was interrupted, test, and report on it."""
        counters, total = self.counters, self.params.epoch_num_steps
        if counters.epoch_steps is None:
            counters.epoch, counters.epoch_steps = counters.epoch + 1, 0
        self._display.begin(counters.epoch, counters.epoch_steps, total)
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
        """Take one training step, and count it."""
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
        if self.params.save_checkpoint_fn is not None:
            self.params.save_checkpoint_fn(counters.epoch, counters.env_step, counters.update_step)
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
        """Play test episodes, and keep the policy if it is the best so far."""
        params, counters = self.params, self.counters
        began = time.monotonic()
        params.test_collector.reset(reset_stats=False)
        if params.test_fn is not None:
            params.test_fn(counters.epoch, counters.env_step)
        stats = self._reduce(params.test_collector.collect(n_episode=params.test_step_num_episodes))
        self._log("log_test_data", stats, counters.env_step)
        score = self._score(stats)
        assert stats.returns_stat is not None
        if is_first or score > counters.best_score:
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
        """Give each episode one return, where the parameters say how."""
        if self.params.multi_agent_return_reduction is None or not stats.n_collected_episodes:
            return stats
        returns = self.params.multi_agent_return_reduction(stats.returns)
        return replace(stats, returns=returns, returns_stat=SequenceSummaryStats.from_sequence(returns))

    # Figures

    def _log(self, method: str, stats: Any, step: int) -> None:
        """Tell the loggers, if there are any, the figures of a report."""
        if self.params.loggers:
            figures = figures_of(stats)
            for logger in self.params.loggers:
                getattr(logger, method)(figures, step)

    def _note_update(self, stats: Any) -> None:
        """Count an update's time, smooth its losses, and tell loggers."""
        stats.smoothed_loss = self._losses.add(stats.get_loss_stats_dict())
        self.counters.update_s += stats.train_time
        self._log("log_update_data", stats, self.counters.update_step)

    def _shown(self, step: TrainingStep) -> dict[str, Any]:
        """Return the figures that matter, for the display."""
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
        """Return the sources of steps, by name."""
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
        load_generators(state["generators"])
        if state["generators"]["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["generators"]["cuda"])
        self._is_resumed = True
        self._seen_s = time.monotonic()
