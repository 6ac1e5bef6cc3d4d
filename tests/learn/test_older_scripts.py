"""Scripts of older documents of Tianshou: trainer functions, checkpoints by the logger, and the list buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces

from samplebatch import Batch, Collector, ListReplayBuffer, VectorReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn import (
    DQN,
    PPO,
    AdamOptimizerFactory,
    DiscreteActorPolicy,
    DiscreteQLearningPolicy,
    Net,
    OffPolicyTrainerParams,
    TensorboardLogger,
    TrainingLog,
    offpolicy_trainer,
    onpolicy_trainer,
    read_log,
)

ACTIONS = spaces.Discrete(2)


def dqn() -> DQN:
    torch.manual_seed(0)
    policy = DiscreteQLearningPolicy(model=Net(4, 2, [8]), action_space=ACTIONS, eps_training=0.5)
    return DQN(policy=policy, optim=AdamOptimizerFactory())


def ppo() -> PPO:
    policy = DiscreteActorPolicy(actor=Net(4, 2, [8]), action_space=ACTIONS)
    return PPO(policy=policy, critic=Net(4, 1, [8]), optim=AdamOptimizerFactory())


def collectors(algorithm: Any, buffer: Any = None) -> tuple[Collector, Collector]:
    buffer = VectorReplayBuffer(2000, 2) if buffer is None else buffer
    train = Collector(algorithm.policy, "CartPole-v1", buffer, num_envs=2, seed=1)
    return train, Collector(algorithm.policy, "CartPole-v1", num_envs=2, seed=2)


def test_the_off_policy_function_of_version_0_2_trains() -> None:
    algorithm, saved = dqn(), []
    train, test = collectors(algorithm)
    result = offpolicy_trainer(
        algorithm,
        train,
        test,
        max_epoch=2,
        step_per_epoch=5,
        collect_per_step=10,
        episode_per_test=2,
        batch_size=16,
        train_fn=lambda *_: None,
        stop_fn=lambda reward: reward >= 1e9,
        save_fn=saved.append,
        verbose=False,
    )
    # An epoch of that version has step_per_epoch updates, each after collect_per_step steps.
    assert (result["train_step"], algorithm.updates) == (100, 10)
    assert result["best_reward"] > 0.0
    assert result["duration"].endswith("s")
    assert saved[0] is algorithm.policy


def test_the_off_policy_function_of_version_0_5_trains() -> None:
    algorithm = dqn()
    train, test = collectors(algorithm)
    options: dict[str, Any] = {"step_per_collect": 10, "update_per_step": 0.2, "verbose": False}
    result = offpolicy_trainer(algorithm.policy, train, test, 1, 50, episode_per_test=2, batch_size=16, **options)
    assert (result["train_step"], algorithm.updates) == (50, 10)


def test_the_on_policy_function_trains_from_a_list_buffer() -> None:
    algorithm, buffer = ppo(), ListReplayBuffer()
    train = Collector(algorithm.policy, "CartPole-v1", buffer, seed=1)
    test = Collector(algorithm.policy, "CartPole-v1", seed=2)
    result = onpolicy_trainer(
        algorithm, train, test, 1, 60, repeat_per_collect=2, episode_per_test=1, batch_size=16, collect_per_step=2,
        verbose=False,
    )  # fmt: skip
    assert result["train_episode"] % 2 == 0
    assert algorithm.updates == result["train_episode"] // 2
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_epochs": 2}, "offpolicy_trainer has no argument 'max_epochs'; did you mean 'max_epoch'"),
        ({"step_per_collect": 5, "collect_per_step": 5}, "exactly one of collect_per_step and step_per_collect"),
        (
            {"step_per_collect": 5, "stop": None},
            "OffPolicyTrainerParams has no argument 'stop'; did you mean 'stop_fn'",
        ),
    ],
)
def test_invalid_arguments_of_trainer_functions_are_reported(options: dict[str, Any], sentence: str) -> None:
    algorithm = dqn()
    with pytest.raises(ArgumentError, match=sentence):
        offpolicy_trainer(algorithm, *collectors(algorithm), 1, 10, **options)
    with pytest.raises(ArgumentError, match="policy must be an algorithm such as"):
        offpolicy_trainer(Net(4, 2), *collectors(algorithm), 1, 10, step_per_collect=5)


def test_a_list_buffer_stores_rows_up_to_its_size() -> None:
    buffer = ListReplayBuffer(size=5)
    for i in range(7):
        buffer.add(obs=i, act=i, rew=i, done=False, obs_next=i + 1, info={})
    assert sorted(buffer.sample(0).batch.obs.tolist()) == [2, 3, 4, 5, 6]
    assert len(ListReplayBuffer()) == 0


@pytest.mark.parametrize("kind", [TensorboardLogger, TrainingLog])
def test_counts_resume_from_the_last_logged_checkpoint(kind: Any, tmp_path: Any) -> None:
    calls: list[tuple[int, int, int]] = []

    def run(epochs: int, *, resume: bool) -> Any:
        algorithm = dqn()
        train, test = collectors(algorithm)
        logger = kind(tmp_path / "log", save_interval=2)
        params = OffPolicyTrainerParams(
            training_collector=train,
            test_collector=test,
            max_epochs=epochs,
            epoch_num_steps=20,
            collection_step_num_env_steps=10,
            update_step_num_gradient_steps_per_sample=0.1,
            save_checkpoint_fn=lambda *counts: calls.append(counts),
            resume_from_log=resume,
            logger=logger,
            verbose=False,
        )
        info = algorithm.run_training(params)
        logger.finalize()
        return info

    run(5, resume=False)
    assert calls == [(2, 40, 4), (4, 80, 8)]
    info = run(6, resume=True)
    assert calls[2:] == [(6, 120, 12)]
    assert (info.train_step, info.update_step) == (120, 12)
    assert kind(tmp_path / "log").restore_data() == (6, 120, 12)
    if kind is TrainingLog:
        log = read_log(tmp_path / "log")
        assert (log["step"][log["name"] == "save/env_step"]).tolist() == [2, 4, 6]


def test_resuming_from_a_log_requires_a_logger() -> None:
    train, test = collectors(dqn())
    with pytest.raises(ArgumentError, match="logger must have restore_data for resume_from_log, got None"):
        OffPolicyTrainerParams(training_collector=train, test_collector=test, resume_from_log=True)


def test_reports_of_updates_print_as_a_dict(capsys: pytest.CaptureFixture[str]) -> None:
    algorithm = dqn()
    train, _ = collectors(algorithm)
    train.collect(n_step=20)
    algorithm.update(train.buffer, 8).pprint_asdict(exclude_fields=["train_time"])
    assert capsys.readouterr().out.startswith("SimpleLossTrainingStats\n")


def test_masked_actions_have_the_lowest_values() -> None:
    policy = dqn().policy
    values = policy.compute_q_value(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), [[False, True], [True, True]])
    assert values.tolist() == [[-3.0, -2.0], [0.0, 3.0]]
    assert policy(Batch(obs=torch.zeros(2, 4))).act.shape == (2,)
