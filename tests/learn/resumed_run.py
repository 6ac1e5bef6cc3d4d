"""Trainings in processes of their own, which may be killed, for tests of resuming."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from samplebatch import Collector, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer
from samplebatch.learn import (
    DQN,
    AdamOptimizerFactory,
    DiscreteQLearningPolicy,
    OfflineAlgorithm,
    OfflineTrainer,
    OfflineTrainerParams,
    OffPolicyTrainer,
    OffPolicyTrainerParams,
    OnPolicyAlgorithm,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
    Policy,
    SimpleLossTrainingStats,
    TrainingLog,
    load_checkpoint,
)

OBS = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(2)
PRELOADED = [
    "gymnasium.envs.classic_control",
    "pandas",
    "pyarrow.parquet",
    "samplebatch.kernels",
    "samplebatch.learn.dqn",
    "samplebatch.learn.trainer",
    "samplebatch.loggers.training_log",
    "samplebatch.storage.datasets.dataset",
    "samplebatch.storage.buffers.state",
    "torch._dynamo",
]


class Unpicklable(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Environment with an attribute that cannot be pickled."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.generator = (number for number in range(3))


def unpicklable() -> Any:
    return Unpicklable(gymnasium.make("CartPole-v1"))


def q_policy() -> DiscreteQLearningPolicy:
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    return DiscreteQLearningPolicy(model=model, action_space=ACTIONS, observation_space=OBS, eps_training=0.3)


class Cloning(OfflineAlgorithm[Policy]):
    """Algorithm that imitates the actions of a buffer."""

    def __init__(self) -> None:
        super().__init__(policy=q_policy())
        self.optim = self._create_optimizer(self.policy, AdamOptimizerFactory(lr=1e-2))

    def _update_with_batch(self, batch: Any, *_: Any) -> SimpleLossTrainingStats:
        loss = torch.nn.functional.cross_entropy(self.policy(batch).logits, batch.act.long())
        self.optim.step(loss)
        return SimpleLossTrainingStats(loss=loss.item())


class Reinforcing(OnPolicyAlgorithm[Policy]):
    """Algorithm that increases the likelihood of actions in random minibatches of a rollout."""

    def __init__(self) -> None:
        super().__init__(policy=q_policy())
        self.optim = self._create_optimizer(self.policy, AdamOptimizerFactory(lr=1e-2))

    def _update_with_batch(self, batch: Any, batch_size: int | None, repeat: int) -> SimpleLossTrainingStats:
        loss = torch.zeros(())
        for _ in range(repeat):
            rows = torch.randperm(len(batch))[:batch_size]
            loss = torch.nn.functional.cross_entropy(self.policy(batch[rows]).logits, batch.act[rows].long())
            self.optim.step(loss)
        return SimpleLossTrainingStats(loss=loss.item())


def dqn() -> DQN:
    return DQN(policy=q_policy(), optim=AdamOptimizerFactory(lr=1e-2), n_step_return_horizon=3, target_update_freq=7)


def make_trainer(kind: str, folder: Path, die: Any) -> Any:
    """Create a trainer of a kind with three epochs, each with some updates and a test."""
    algorithm: Any = {"dqn": dqn, "unpicklable": dqn, "on policy": Reinforcing, "offline": Cloning}[kind]()
    common: dict[str, Any] = {
        "test_collector": Collector(algorithm.policy, "CartPole-v1", num_envs=2, seed=2),
        "test_step_num_episodes": 3,
        "max_epochs": 4,
        "batch_size": 16,
        "checkpoint_dir": folder / "checkpoint",
        "logger": TrainingLog(folder / "log"),
        "verbose": False,
        "show_progress": False,
    }
    if kind == "offline":
        rows = ReplayBuffer(200, random_seed=4)
        Collector("random", "CartPole-v1", rows, seed=3).collect(n_step=200)
        return OfflineTrainer(algorithm, OfflineTrainerParams(buffer=rows, epoch_num_steps=20, test_fn=die, **common))
    buffers: dict[str, Any] = {
        "dqn": PrioritizedVectorReplayBuffer(300, 2, alpha=0.6, beta=0.4, random_seed=4),
        "unpicklable": VectorReplayBuffer(300, 2, random_seed=4),
        "on policy": VectorReplayBuffer(300, 2, random_seed=4),
    }
    collector = Collector(
        algorithm.policy,
        unpicklable if kind == "unpicklable" else "CartPole-v1",
        buffers[kind],
        num_envs=2,
        seed=1,
        exploration_noise=True,
    )
    online = common | {
        "training_collector": collector,
        "epoch_num_steps": 120,
        "collection_step_num_env_steps": 24,
        "training_fn": die,
    }
    if kind == "on policy":
        return OnPolicyTrainer(algorithm, OnPolicyTrainerParams(update_step_num_repetitions=3, **online))
    return OffPolicyTrainer(algorithm, OffPolicyTrainerParams(update_step_num_gradient_steps_per_sample=0.25, **online))


def train(kind: str, folder: Path, die_at: int | None, die_saving: int | None) -> None:
    """Train from the checkpoint in the folder, if any, and write the final parameters into the folder.

    The process is killed at the start of the training step or test at `die_at` environment or gradient steps, or while
    it writes checkpoint number `die_saving`.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)

    def die(_: int, steps: int) -> None:
        if die_at is not None and steps >= die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    saves, save = [], torch.save

    def save_half(state: Any, file: Any) -> None:
        saves.append(file)
        if len(saves) == die_saving:
            file.write(b"half of a file")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(state, file)

    torch.save = save_half
    trainer = make_trainer(kind, folder, die)
    if (folder / "checkpoint").exists():
        why = load_checkpoint(trainer, folder / "checkpoint", allow_pickle=True)
        (folder / "resumed.txt").write_text(f"in epoch {trainer.counters.epoch}, reset: {why}")
    trainer.run()
    save(trainer.algorithm.state_dict(), folder / "final.pt")


def run(kind: str, folder: Path, die_at: int | None = None, die_saving: int | None = None) -> int | None:
    """Run a training in a process; return its exit code."""
    processes = multiprocessing.get_context("forkserver")
    # This very module is not on the path of the server, so its imports are named.
    processes.set_forkserver_preload(PRELOADED)
    process = processes.Process(target=train, args=(kind, folder, die_at, die_saving))
    process.start()
    process.join(120)
    return process.exitcode
