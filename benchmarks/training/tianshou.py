"""Tianshou's runs in the learning benchmark: its collectors, buffers, algorithms and trainers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.training.tasks import Act, Curve, Task, reached
from benchmarks.training.team import seats
from benchmarks.training.tianshou_setup import (
    discrete_actor,
    network,
    optimizer,
    pair_values,
    q_policy,
    soft_policy,
    state_values,
)

Run = Callable[[], Act]


def _vector(task: Task, curve: Curve, seed: int) -> Any:
    from tianshou.env import DummyVectorEnv

    envs = DummyVectorEnv([curve.watch(task.make)] * task.envs)
    envs.seed(seed)
    return envs


def _acting(policy: Any, wrap: Callable[[Any], Any], row: Any = 0) -> Act:
    from tianshou.data import Batch

    def act(obs: Any, state: Any) -> Any:
        policy.eval()
        with torch.no_grad():
            result = policy(Batch(obs=wrap(obs), info=Batch()), state)
        action = result.act[row].numpy() if isinstance(result.act, torch.Tensor) else result.act[row]
        return policy.map_action(action), result.get("state")

    return act


def _rows(obs: Any) -> Any:
    return obs[None]


def _team_vector(task: Task, curve: Curve, seed: int) -> Any:
    """Create a vector environment with one environment per agent.

    Tianshou's multi-agent class passes rewards to the agent that acted last; here, all agents act before rewards.
    """
    from tianshou.env import BaseVectorEnv
    from tianshou.env.worker import DummyEnvWorker

    class Worker(DummyEnvWorker):  # type: ignore[misc]
        def get_env_attr(self, key: str) -> Any:
            return getattr(self.env, key)

        def send(self, action: Any, **options: Any) -> None:
            self.env.send(action)

        def recv(self) -> Any:
            return self.env.receive()

    return BaseVectorEnv([lambda item=part: item for part in seats(task, curve, seed)], Worker)


def ppo(task: Task, curve: Curve, seed: int) -> Run:
    envs = _vector(task, curve, seed)
    return _on_policy(task, _ppo(task, envs), envs, _rows)


def a2c(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.modelfree.a2c import A2C

    envs = _vector(task, curve, seed)
    return _on_policy(task, A2C(**_actor_critic(task, envs)), envs, _rows)


def mappo(task: Task, curve: Curve, seed: int) -> Run:
    """Learn with PPO and one policy for all agents."""
    envs, count = _team_vector(task, curve, seed), task.agents
    options = task.options | {"batch": task.options["batch"] * count}
    for_all = replace(task, envs=task.envs * count, steps=task.steps * count, options=options)
    return _on_policy(for_all, _ppo(task, envs), envs, lambda obs: obs, slice(None))


def _actor_critic(task: Task, envs: Any) -> dict[str, Any]:
    options, activation = task.options, {"activation": torch.nn.Tanh}
    return {
        "policy": discrete_actor(envs, task.hidden, **activation),
        "critic": state_values(envs, task.hidden, **activation),
        "optim": optimizer(task.lr),
        "ent_coef": options["entropy"],
        "gamma": task.gamma,
        "max_grad_norm": options["norm"],
        "gae_lambda": options["lambda"],
    }


def _ppo(task: Task, envs: Any) -> Any:
    from tianshou.algorithm.modelfree.ppo import PPO

    return PPO(eps_clip=task.options["clip"], **_actor_critic(task, envs))


def _on_policy(task: Task, algorithm: Any, envs: Any, wrap: Any, row: Any = 0) -> Run:
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.trainer import OnPolicyTrainerParams

    options = task.options
    step = task.envs * options["n_steps"]
    collector = Collector(algorithm, envs, VectorReplayBuffer(step, task.envs))
    params = OnPolicyTrainerParams(
        training_collector=collector, max_epochs=1, epoch_num_steps=task.steps, collection_step_num_env_steps=step,
        update_step_num_repetitions=options["epochs"], batch_size=options["batch"], test_step_num_episodes=0,
        show_progress=False, verbose=False,
    )  # fmt: skip

    def run() -> Act:
        algorithm.run_training(params)
        return _acting(algorithm.policy, wrap, row)

    return run


def _off_policy(task: Task, algorithm: Any, envs: Any, buffer: Any, wrap: Any, *, noise: bool, **params: Any) -> Run:
    from tianshou.data import Collector
    from tianshou.trainer import OffPolicyTrainerParams

    options = task.options
    collector = Collector(algorithm, envs, buffer, exploration_noise=noise)

    def run() -> Act:
        collector.reset()
        collector.collect(n_step=options["start"], random=True)
        algorithm.run_training(
            OffPolicyTrainerParams(
                training_collector=collector,
                max_epochs=1,
                epoch_num_steps=task.steps - options["start"],
                collection_step_num_env_steps=options["every"],
                batch_size=options["batch"],
                update_step_num_gradient_steps_per_sample=options["updates"] / options["every"],
                test_step_num_episodes=0,
                show_progress=False,
                verbose=False,
                **params,
            )
        )
        return _acting(algorithm.policy, wrap)

    return run


def _q_learning(task: Task, envs: Any, net: Any, buffer: Any, wrap: Any) -> Run:
    from tianshou.algorithm.modelfree.dqn import DQN

    options = task.options
    policy = q_policy(envs, net)
    policy.set_eps_inference(0.0)
    algorithm = DQN(
        policy=policy, optim=optimizer(task.lr), gamma=task.gamma, target_update_freq=max(options["target"], 1),
        is_double=False, huber_loss_delta=1.0,
    )  # fmt: skip
    until = options["fraction"] * task.steps

    def explore(epoch: int, step: int) -> None:
        policy.set_eps_training(1 + (options["epsilon"] - 1) * min(step / until, 1.0))

    return _off_policy(task, algorithm, envs, buffer, wrap, noise=True, training_fn=explore)


def dqn(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.data import VectorReplayBuffer

    envs = _vector(task, curve, seed)
    return _q_learning(task, envs, network(envs, task.hidden), VectorReplayBuffer(task.options["size"], 1), _rows)


class _GoalNetwork(torch.nn.Module):
    """Network whose input is the concatenated observation and desired goal."""

    def __init__(self, width: int, actions: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        from tianshou.utils.net.common import Net

        self.net = Net(state_shape=2 * width, action_shape=actions, hidden_sizes=hidden)

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
        joined = np.concatenate([obs.observation, obs.desired_goal], -1)
        return self.net(joined, state)


def her(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.data import Batch, HERVectorReplayBuffer

    envs = _vector(task, curve, seed)
    bits = envs.action_space[0].n
    buffer = HERVectorReplayBuffer(
        task.options["size"], 1, compute_reward_fn=reached, horizon=task.options["horizon"], future_k=4
    )
    net = _GoalNetwork(bits, int(bits), task.hidden)
    return _q_learning(task, envs, net, buffer, lambda obs: Batch({name: value[None] for name, value in obs.items()}))


def _soft(task: Task, envs: Any, kind: Any, **options: Any) -> Any:
    from tianshou.algorithm.modelfree.sac import AutoAlpha

    return kind(
        policy=soft_policy(envs, task.hidden), policy_optim=optimizer(task.lr), critic=pair_values(envs, task.hidden),
        critic_optim=optimizer(task.lr), tau=task.options["tau"], gamma=task.gamma,
        alpha=AutoAlpha(-1.0, 0.0, optimizer(task.lr)), **options,
    )  # fmt: skip


def sac(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.modelfree.sac import SAC
    from tianshou.data import VectorReplayBuffer

    envs = _vector(task, curve, seed)
    buffer = VectorReplayBuffer(task.options["size"], 1)
    return _off_policy(task, _soft(task, envs, SAC), envs, buffer, _rows, noise=False)


def _deterministic_policy(task: Task, envs: Any) -> Any:
    from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
    from tianshou.exploration import GaussianNoise
    from tianshou.utils.net.continuous import ContinuousActorDeterministic

    space = envs.action_space[0]
    actor = ContinuousActorDeterministic(
        preprocess_net=network(envs, task.hidden, actions=False), action_shape=space.shape, max_action=1.0
    )
    return ContinuousDeterministicPolicy(
        actor=actor, exploration_noise=GaussianNoise(sigma=task.options["noise"]), action_space=space
    )


def _deterministic(task: Task, curve: Curve, seed: int, kind: Any) -> Run:
    from tianshou.data import VectorReplayBuffer

    envs = _vector(task, curve, seed)
    algorithm = kind(
        policy=_deterministic_policy(task, envs), policy_optim=optimizer(task.lr),
        critic=pair_values(envs, task.hidden), critic_optim=optimizer(task.lr), tau=task.options["tau"],
        gamma=task.gamma,
    )  # fmt: skip
    return _off_policy(task, algorithm, envs, VectorReplayBuffer(task.options["size"], 1), _rows, noise=True)


def td3(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.modelfree.td3 import TD3

    return _deterministic(task, curve, seed, TD3)


def ddpg(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.modelfree.ddpg import DDPG

    return _deterministic(task, curve, seed, DDPG)


def _distributional(
    task: Task, curve: Curve, seed: int, kind: Any, policy_class: Any, buffer: Any, atoms: dict[str, Any], **net: Any
) -> Run:
    options, envs = task.options, _vector(task, curve, seed)
    model = network(envs, task.hidden, num_atoms=options["atoms"], **net)
    policy = policy_class(model=model, action_space=envs.action_space[0], **atoms)
    counts = {} if atoms else {"num_quantiles": options["atoms"]}
    algorithm = kind(
        policy=policy, optim=optimizer(task.lr), gamma=task.gamma, target_update_freq=options["target"],
        n_step_return_horizon=options["n_step"], **counts,
    )  # fmt: skip
    until = options["fraction"] * task.steps

    def explore(epoch: int, step: int) -> None:
        policy.set_eps_training(1 + (options["epsilon"] - 1) * min(step / until, 1.0))

    return _off_policy(task, algorithm, envs, buffer, _rows, noise=True, training_fn=explore)


def _atoms(task: Task) -> dict[str, Any]:
    return {"num_atoms": task.options["atoms"], "v_min": task.options["v_min"], "v_max": task.options["v_max"]}


def c51(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.modelfree.c51 import C51, C51Policy
    from tianshou.data import VectorReplayBuffer

    buffer = VectorReplayBuffer(task.options["size"], 1)
    return _distributional(task, curve, seed, C51, C51Policy, buffer, _atoms(task), softmax=True)


def qrdqn(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.modelfree.qrdqn import QRDQN, QRDQNPolicy
    from tianshou.data import VectorReplayBuffer

    return _distributional(task, curve, seed, QRDQN, QRDQNPolicy, VectorReplayBuffer(task.options["size"], 1), {})


def rainbow(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.modelfree.c51 import C51Policy
    from tianshou.algorithm.modelfree.rainbow import RainbowDQN
    from tianshou.data import PrioritizedVectorReplayBuffer
    from tianshou.utils.net.discrete import NoisyLinear

    options = task.options
    buffer = PrioritizedVectorReplayBuffer(options["size"], 1, alpha=options["alpha"], beta=options["beta"])
    net: dict[str, Any] = {"softmax": True, "dueling_param": ({}, {}), "linear_layer": NoisyLinear}
    return _distributional(task, curve, seed, RainbowDQN, C51Policy, buffer, _atoms(task), **net)


def dsac(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.modelfree.discrete_sac import DiscreteSAC, DiscreteSACPolicy
    from tianshou.data import VectorReplayBuffer
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

    options, envs = task.options, _vector(task, curve, seed)
    space = envs.action_space[0]

    def body() -> Any:
        return network(envs, task.hidden, actions=False)

    actor = DiscreteActor(preprocess_net=body(), action_shape=space.n, softmax_output=False)
    critics = [DiscreteCritic(preprocess_net=body(), last_size=space.n) for _ in range(2)]
    algorithm = DiscreteSAC(
        policy=DiscreteSACPolicy(actor=actor, action_space=space), policy_optim=optimizer(task.lr), critic=critics[0],
        critic2=critics[1], critic_optim=optimizer(task.lr), critic2_optim=optimizer(task.lr), tau=options["tau"],
        gamma=task.gamma, alpha=options["alpha"], n_step_return_horizon=options["n_step"],
    )  # fmt: skip
    return _off_policy(task, algorithm, envs, VectorReplayBuffer(options["size"], 1), _rows, noise=False)


def _offline(task: Task, curve: Curve, algorithm: Any) -> Run:
    from tianshou.data import ReplayBuffer
    from tianshou.trainer import OfflineTrainerParams

    from samplebatch import load

    rows = load(task.options["data"]).as_batch("tianshou")
    columns = {name: rows[name] for name in ("obs", "act", "rew", "terminated", "truncated", "obs_next")}
    buffer = ReplayBuffer.from_data(**columns, done=rows.terminated | rows.truncated)
    params = OfflineTrainerParams(
        buffer=buffer, max_epochs=1, epoch_num_steps=task.steps, batch_size=task.options["batch"],
        test_step_num_episodes=0, show_progress=False, verbose=False,
    )  # fmt: skip

    def run() -> Act:
        algorithm.run_training(params)
        curve.steps = task.steps
        return _acting(algorithm.policy, _rows)

    return run


def bc(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.imitation.imitation_base import ImitationPolicy, OfflineImitationLearning

    envs = _vector(replace(task, envs=1), curve, seed)
    actor = discrete_actor(envs, task.hidden).actor
    policy = ImitationPolicy(actor=actor, action_space=envs.action_space[0])
    return _offline(task, curve, OfflineImitationLearning(policy=policy, optim=optimizer(task.lr)))


def cql(task: Task, curve: Curve, seed: int) -> Run:
    from tianshou.algorithm.imitation.cql import CQL

    options = {"cql_weight": task.options["weight"], "with_lagrange": False}
    envs = _vector(replace(task, envs=1), curve, seed)
    return _offline(task, curve, _soft(task, envs, CQL, **options))


RUNS = {
    "ppo": ppo, "a2c": a2c, "mappo": mappo, "dqn": dqn, "sac": sac, "td3": td3, "her": her, "bc": bc, "cql": cql,
    "ddpg": ddpg, "c51": c51, "qrdqn": qrdqn, "rainbow": rainbow, "dsac": dsac,
}  # fmt: skip
"""Runs by task; `recurrent` is missing, because Tianshou's recurrent policies do not support PPO."""
