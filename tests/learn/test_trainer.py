"""Trainers: how often they collect, update and test, when they stop, and what they report."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from counting import Counting, Stats

from samplebatch import Batch, Collector, ReplayBuffer, RolloutWorkers, VectorReplayBuffer
from samplebatch.errors import ArgumentError, NonFiniteLossError
from samplebatch.learn import (
    OfflineTrainer,
    OfflineTrainerParams,
    OffPolicyTrainer,
    OffPolicyTrainerParams,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
)

TRAINERS: dict[str, tuple[Any, Any]] = {
    "on policy": (OnPolicyTrainer, OnPolicyTrainerParams),
    "off policy": (OffPolicyTrainer, OffPolicyTrainerParams),
}
QUIET = {"verbose": False, "show_progress": False}


def collectors(policy: Any, num_envs: int = 2) -> dict[str, Collector]:
    """Return a collector with a buffer, and a test collector."""
    return {
        "training_collector": Collector(
            policy, "CartPole-v1", VectorReplayBuffer(1000, num_envs), num_envs=num_envs, seed=1
        ),
        "test_collector": Collector(policy, "CartPole-v1", seed=2),
    }


def tianshou_counting() -> Any:
    """Return an algorithm of Tianshou that records its updates, with the policy of `Counting`."""
    algorithms = pytest.importorskip("tianshou.algorithm.algorithm_base")

    class TheirStats(algorithms.TrainingStats):  # type: ignore[misc,name-defined]
        def get_loss_stats_dict(self) -> dict[str, float]:
            return {"loss": 0.0}

    class Theirs(algorithms.OffPolicyAlgorithm):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            ours = Counting()
            super(algorithms.Algorithm, self).__init__()
            self.policy, self.own = ours.policy, ours

        def _update_with_batch(self, batch: Any) -> Any:
            raise NotImplementedError

        def process_buffer(self, buffer: Any) -> Any:
            return buffer

        def update(self, buffer: Any, **options: Any) -> Any:
            self.own.update(buffer, **options)
            return TheirStats()

    return Theirs()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "steps": ("off policy", {"collection_step_num_env_steps": 10, "epoch_num_steps": 95}),
    "episodes": (
        "off policy",
        {"collection_step_num_env_steps": None, "collection_step_num_episodes": 3, "epoch_num_steps": 200},
    ),
    "few gradient steps": (
        "off policy",
        {"collection_step_num_env_steps": 20, "update_step_num_gradient_steps_per_sample": 0.13, "batch_size": 7},
    ),
    "on policy": (
        "on policy",
        {"collection_step_num_env_steps": 31, "update_step_num_repetitions": 4, "batch_size": None},
    ),
    "stopped by tests": ("off policy", {"collection_step_num_env_steps": 50, "stop_fn": lambda score: score > 42}),
    "stopped while training": (
        "on policy",
        {"collection_step_num_env_steps": 50, "stop_fn": lambda score: score > 41, "test_in_training": True},
    ),
    "scored": (
        "on policy",
        {"collection_step_num_env_steps": 50, "compute_score_fn": lambda stats: -stats.returns_stat.mean},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_updates_and_tests_agree_with_tianshou(case: str) -> None:
    theirs = pytest.importorskip("tianshou.trainer")
    kind, options = CASES[case]
    options = {"max_epochs": 3, "epoch_num_steps": 100, "test_step_num_episodes": 3, **QUIET, **options}
    trainer, params = TRAINERS[kind]
    own, other = Counting(), tianshou_counting()
    ours = trainer(own, params(**collectors(own.policy), **options)).run()
    observed = getattr(theirs, trainer.__name__)(
        other, getattr(theirs, params.__name__)(**collectors(other.policy), **options)
    ).run()
    assert own.updates
    assert own.updates == other.own.updates
    assert ours.gradient_step == len(own.updates)
    names = [name for name in vars(observed) if name != "timing"]
    assert {name: getattr(ours, name) for name in names} == {name: getattr(observed, name) for name in names}


def test_an_offline_trainer_updates_as_often_as_tianshou() -> None:
    theirs = pytest.importorskip("tianshou.trainer")
    algorithms = pytest.importorskip("tianshou.algorithm.algorithm_base")
    own, other = Counting(), tianshou_counting()
    assert isinstance(other, algorithms.Algorithm)
    buffer = ReplayBuffer(10)
    buffer.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, obs_next=1, info={}))
    options = {"buffer": buffer, "max_epochs": 2, "epoch_num_steps": 5, "batch_size": 3, **QUIET}
    ours = OfflineTrainer(own, OfflineTrainerParams(**options)).run()
    observed = theirs.OfflineTrainer(other, theirs.OfflineTrainerParams(**options)).run()
    assert own.updates == other.own.updates == [(1, 3, None, None)] * 10
    assert (ours.update_step, ours.train_step) == (observed.update_step, observed.train_step) == (10, 0)


def test_any_object_with_reset_and_collect_is_a_test_collector() -> None:
    algorithm = Counting()
    original = collectors(algorithm.policy)

    class Wrapped:
        reset, collect = original["test_collector"].reset, original["test_collector"].collect

    params = OffPolicyTrainerParams(
        training_collector=original["training_collector"],
        test_collector=Wrapped(),
        max_epochs=1,
        epoch_num_steps=10,
        **QUIET,
    )
    assert OffPolicyTrainer(algorithm, params).run().test_episode == 2


def test_the_policy_is_in_training_mode_only_while_collecting() -> None:
    algorithm = Counting()
    requested: list[set[bool]] = []

    def note(*_: int) -> None:
        requested.append(set(algorithm.policy.asked))
        algorithm.policy.asked.clear()

    params = OnPolicyTrainerParams(
        **collectors(algorithm.policy),
        **QUIET,
        max_epochs=1,
        epoch_num_steps=50,
        collection_step_num_env_steps=50,
        training_fn=note,
        test_fn=note,
    )
    OnPolicyTrainer(algorithm, params).run()
    note()
    assert requested == [set(), {False}, {True}, {False}]
    assert not algorithm.policy.is_within_training_step


def test_hooks_are_called_in_the_documented_order() -> None:
    algorithm = Counting()
    calls: list[tuple[Any, ...]] = []
    params = OffPolicyTrainerParams(
        **collectors(algorithm.policy),
        **QUIET,
        max_epochs=2,
        epoch_num_steps=20,
        collection_step_num_env_steps=10,
        training_fn=lambda epoch, steps: calls.append(("training", epoch, steps)),
        test_fn=lambda epoch, steps: calls.append(("test", epoch, steps)),
        save_best_fn=lambda best: calls.append(("best", best is algorithm)),
        save_checkpoint_fn=lambda *counts: calls.append(("checkpoint", *counts)),
        compute_score_fn=lambda stats: float(len(calls)),
    )
    OffPolicyTrainer(algorithm, params).run()
    assert calls == [
        ("test", 0, 0),
        ("best", True),
        ("training", 1, 0),
        ("training", 1, 10),
        ("checkpoint", 1, 20, 2),
        ("test", 1, 20),
        ("best", True),
        ("training", 2, 20),
        ("training", 2, 30),
        ("checkpoint", 2, 40, 4),
        ("test", 2, 40),
        ("best", True),
    ]


def test_a_requested_stop_ends_the_run_and_the_next_run_resumes() -> None:
    algorithm = Counting()
    params = OffPolicyTrainerParams(
        **collectors(algorithm.policy),
        **QUIET,
        max_epochs=2,
        epoch_num_steps=30,
        collection_step_num_env_steps=10,
        training_fn=lambda _, steps: trainer.request_stop() if steps in (10, 40) else None,
    )
    trainer = OffPolicyTrainer(algorithm, params)
    assert [(trainer.run().train_step, trainer.is_done) for _ in range(3)] == [(20, False), (50, False), (60, True)]
    assert trainer.counters.test_episode == 3


def test_an_epoch_can_be_executed_by_itself() -> None:
    algorithm = Counting()
    params = OnPolicyTrainerParams(
        **collectors(algorithm.policy), **QUIET, epoch_num_steps=200, collection_step_num_env_steps=100
    )
    stats = OnPolicyTrainer(algorithm, params).execute_epoch()
    assert (stats.epoch, stats.info_stat.update_step, stats.info_stat.train_step) == (1, 2, 200)
    assert stats.train_collect_stat is not None
    assert stats.train_collect_stat.n_collected_steps == 100
    assert stats.test_collect_stat is not None
    assert stats.test_collect_stat.n_collected_episodes == 1
    assert stats.training_stat.smoothed_loss == {"loss": 1.5}
    assert stats.info_stat.timing.total_time > stats.info_stat.timing.train_time_collect > 0


def test_printed_lines_show_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    algorithm = Counting()
    params = OnPolicyTrainerParams(
        **collectors(algorithm.policy), max_epochs=1, epoch_num_steps=200, collection_step_num_env_steps=100
    )
    OnPolicyTrainer(algorithm, params).run()
    before, epoch, test = capsys.readouterr().out.splitlines()
    assert before.startswith("before training: test return ")
    assert epoch.startswith("epoch 1: updates 2, env steps 200, return ")
    assert "loss 1.5" in epoch
    assert test.startswith("epoch 1: test return ")


def test_lines_show_the_latest_return_if_no_episode_has_finished(
    capsys: pytest.CaptureFixture[str],
) -> None:
    algorithm = Counting()
    params = OnPolicyTrainerParams(
        **collectors(algorithm.policy), max_epochs=1, epoch_num_steps=201, collection_step_num_env_steps=1
    )
    OnPolicyTrainer(algorithm, params).run()
    _, epoch, _ = capsys.readouterr().out.splitlines()
    actual = re.search(r"return (\S+),", epoch)
    assert actual is not None
    assert 5.0 < float(actual[1]) < 100.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_epoch": 3}, "OffPolicyTrainerParams has no argument 'max_epoch'; did you mean 'max_epochs'?"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1, got 0"),
        ({"collection_step_num_episodes": 2}, "got 2048 and 2; .* set collection_step_num_env_steps=None"),
        ({"test_collector": None, "stop_fn": bool}, "test_collector must be a collector for stop_fn, got None"),
        ({"test_in_training": True}, "test_collector and stop_fn must be passed for test_in_training, got None"),
        ({"update_step_num_gradient_steps_per_sample": -1}, "must be a number above 0, got -1"),
        ({"training_collector": Collector("random", "CartPole-v1")}, "training_collector must have a buffer"),
        ({"logger": "runs/log"}, "logger must be a logger, or several, got a str"),
        ({"overlap": True}, "training_collector must be RolloutWorkers for overlap, got a Collector"),
    ],
)
def test_parameters_are_rejected_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        OffPolicyTrainerParams(**collectors(Counting().policy) | options)


@pytest.mark.parametrize("trainer", [OnPolicyTrainer, OffPolicyTrainer, OfflineTrainer])
def test_parameters_of_another_trainer_are_rejected(trainer: Any) -> None:
    algorithm = Counting()
    others: Any = OfflineTrainerParams(buffer=ReplayBuffer(1))
    if trainer is OfflineTrainer:
        others = OnPolicyTrainerParams(**collectors(algorithm.policy))
    sentence = f"params must be {trainer.__name__}Params for {trainer.__name__}, got {type(others).__name__}"
    with pytest.raises(ArgumentError, match=sentence):
        trainer(algorithm, others)


def test_test_episodes_require_a_collector() -> None:
    workers = RolloutWorkers("random", "CartPole-v1", num_workers=1, backend="inline")
    with pytest.raises(ArgumentError, match="test_collector must be a collector, got a RolloutWorkers"):
        OffPolicyTrainerParams(**collectors(Counting().policy) | {"test_collector": workers})
    workers.stop()


def test_a_collection_without_a_gradient_step_is_rejected() -> None:
    algorithm = Counting()
    params = OffPolicyTrainerParams(
        **collectors(algorithm.policy),
        **QUIET,
        collection_step_num_env_steps=4,
        update_step_num_gradient_steps_per_sample=0.1,
    )
    with pytest.raises(
        ArgumentError, match=r"must yield at least one gradient step per collection, got 0\.1 for 4 steps"
    ):
        OffPolicyTrainer(algorithm, params).run()


def test_returns_are_reduced_before_the_score_is_computed() -> None:
    algorithm = Counting()
    params = OnPolicyTrainerParams(
        **collectors(algorithm.policy), **QUIET, max_epochs=1, multi_agent_return_reduction=lambda returns: -returns
    )
    assert OnPolicyTrainer(algorithm, params).run().best_reward < 0


def test_losses_that_are_not_finite_stop_training() -> None:
    class Diverging(Counting):
        def update(self, buffer: Any, **options: Any) -> Stats:
            stats = super().update(buffer, **options)
            return stats if len(self.updates) != 2 else Stats(loss=np.nan)

    options = QUIET | {"epoch_num_steps": 300, "collection_step_num_env_steps": 100}
    algorithm = Diverging()
    params = OnPolicyTrainerParams(**collectors(algorithm.policy), **options)
    with pytest.raises(NonFiniteLossError, match="loss must be finite, got nan"):
        OnPolicyTrainer(algorithm, params).run()
    assert len(algorithm.updates) == 2
    algorithm = Diverging()
    params = OnPolicyTrainerParams(**collectors(algorithm.policy), **options, allow_nonfinite=True)
    assert np.isnan(OnPolicyTrainer(algorithm, params).execute_epoch().training_stat.smoothed_loss["loss"])


def test_a_test_score_of_nan_is_never_the_best() -> None:
    algorithm = Counting()
    scores = iter([np.nan, 1.0, np.nan, 0.5])
    params = OnPolicyTrainerParams(
        **collectors(algorithm.policy), **QUIET, max_epochs=3, compute_score_fn=lambda _: next(scores)
    )
    assert OnPolicyTrainer(algorithm, params).run().best_score == 1.0
