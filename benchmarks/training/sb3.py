"""Stable-Baselines3's runs in the learning benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.training.tasks import Act, Curve, Task
from benchmarks.training.team import seats

Run = Callable[[], Act]


def _vector(task: Task, curve: Curve) -> Any:
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([curve.watch(task.make)] * task.envs)


def _team_vector(task: Task, curve: Curve, seed: int) -> Any:
    """Create a vector environment with one environment per agent."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Vector(DummyVecEnv):
        """Vector environment that sends all actions before it waits for results."""

        def step_wait(self) -> Any:
            for env, action in zip(self.envs, self.actions, strict=True):
                env.send(action)
            results = [env.receive() for env in self.envs]
            obs, rewards, terminated, truncated, _ = map(np.array, zip(*results, strict=True))
            infos: list[dict[str, Any]] = [{} for _ in results]
            done = terminated | truncated
            for env_id in np.flatnonzero(done):
                infos[env_id] = {"TimeLimit.truncated": bool(truncated[env_id] and not terminated[env_id])}
                infos[env_id]["terminal_observation"] = obs[env_id]
                self.envs[env_id].send(None)
            for env_id in np.flatnonzero(done):
                obs[env_id] = self.envs[env_id].receive()[0]
            return obs, rewards, done, infos

        def reset(self) -> Any:
            for env in self.envs:
                env.send(None)
            return np.stack([env.receive()[0] for env in self.envs])

    return Vector([lambda item=part: item for part in seats(task, curve, seed)])


def _acting(model: Any) -> Act:
    def act(obs: Any, state: Any) -> Any:
        actions, state = model.predict(obs, state, deterministic=True)
        return actions, state

    return act


def _learning(model: Any, task: Task) -> Run:
    def run() -> Act:
        model.learn(task.steps)
        return _acting(model)

    return run


def _on_policy(kind: Any, policy: str, task: Task, envs: Any, seed: int, **network: Any) -> Run:
    options = task.options
    model = kind(
        policy, envs, task.lr, options["n_steps"], options["batch"], options["epochs"], task.gamma,
        options["lambda"], options["clip"], ent_coef=options["entropy"], max_grad_norm=options["norm"], seed=seed,
        device="cpu", policy_kwargs={"net_arch": [*task.hidden], "activation_fn": torch.nn.Tanh, **network},
    )  # fmt: skip
    return _learning(model, task)


def ppo(task: Task, curve: Curve, seed: int) -> Run:
    from stable_baselines3 import PPO

    return _on_policy(PPO, "MlpPolicy", task, _vector(task, curve), seed)


def a2c(task: Task, curve: Curve, seed: int) -> Run:
    from stable_baselines3 import A2C

    options = task.options
    model = A2C(
        "MlpPolicy", _vector(task, curve), task.lr, options["n_steps"], task.gamma, options["lambda"],
        options["entropy"], max_grad_norm=options["norm"], use_rms_prop=False, seed=seed, device="cpu",
        policy_kwargs={"net_arch": [*task.hidden], "activation_fn": torch.nn.Tanh},
    )  # fmt: skip
    return _learning(model, task)


def recurrent(task: Task, curve: Curve, seed: int) -> Run:
    from sb3_contrib import RecurrentPPO

    envs = _vector(task, curve)
    return _on_policy(RecurrentPPO, "MlpLstmPolicy", task, envs, seed, lstm_hidden_size=task.options["state"])


def mappo(task: Task, curve: Curve, seed: int) -> Run:
    """Learn with PPO and one policy for all agents."""
    from stable_baselines3 import PPO

    settings = replace(
        task, steps=task.steps * task.agents, options=task.options | {"batch": task.options["batch"] * task.agents}
    )
    return _on_policy(PPO, "MlpPolicy", settings, _team_vector(task, curve, seed), seed)


def _off_policy(kind: Any, policy: str, task: Task, curve: Curve, seed: int, **options: Any) -> Run:
    settings = task.options
    model = kind(
        policy, _vector(task, curve), task.lr, settings["size"], settings["start"], settings["batch"], gamma=task.gamma,
        train_freq=settings["every"], gradient_steps=settings["updates"], seed=seed, device="cpu",
        policy_kwargs={"net_arch": [*task.hidden], "activation_fn": torch.nn.ReLU}, **options,
    )  # fmt: skip
    return _learning(model, task)


def _q_learning(task: Task, curve: Curve, seed: int, policy: str, **options: Any) -> Run:
    from stable_baselines3 import DQN

    settings = task.options
    # Stable-Baselines3 updates the target network per environment steps; the other contestants count updates.
    interval = settings["target"] * settings["every"] // settings["updates"]
    return _off_policy(
        DQN, policy, task, curve, seed, target_update_interval=interval, exploration_fraction=settings["fraction"],
        exploration_final_eps=settings["epsilon"], **options,
    )  # fmt: skip


def dqn(task: Task, curve: Curve, seed: int) -> Run:
    return _q_learning(task, curve, seed, "MlpPolicy")


def her(task: Task, curve: Curve, seed: int) -> Run:
    from stable_baselines3 import HerReplayBuffer

    hindsight = {"n_sampled_goal": 4, "goal_selection_strategy": "future"}
    return _q_learning(
        task, curve, seed, "MultiInputPolicy", replay_buffer_class=HerReplayBuffer, replay_buffer_kwargs=hindsight
    )


def sac(task: Task, curve: Curve, seed: int) -> Run:
    from stable_baselines3 import SAC

    return _off_policy(SAC, "MlpPolicy", task, curve, seed, tau=task.options["tau"])


def _deterministic(kind: Any, task: Task, curve: Curve, seed: int) -> Run:
    from stable_baselines3.common.noise import NormalActionNoise

    noise = NormalActionNoise(np.zeros(1), np.full(1, task.options["noise"]))
    return _off_policy(kind, "MlpPolicy", task, curve, seed, tau=task.options["tau"], action_noise=noise)


def td3(task: Task, curve: Curve, seed: int) -> Run:
    from stable_baselines3 import TD3

    return _deterministic(TD3, task, curve, seed)


def ddpg(task: Task, curve: Curve, seed: int) -> Run:
    from stable_baselines3 import DDPG

    return _deterministic(DDPG, task, curve, seed)


RUNS = {
    "ppo": ppo, "a2c": a2c, "mappo": mappo, "dqn": dqn, "sac": sac, "td3": td3, "her": her, "recurrent": recurrent,
    "ddpg": ddpg,
}  # fmt: skip
