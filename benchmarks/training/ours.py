"""Our runs in the learning benchmark: `samplebatch.learn` with our collectors and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Load the compiled code before the clock starts, as peers load their modules on import.
import samplebatch.kernels  # noqa: F401
from benchmarks.training.tasks import Act, Curve, Task, reached
from samplebatch import (
    Batch,
    HERVectorReplayBuffer,
    MultiAgentCollector,
    MultiAgentReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
    load,
)
from samplebatch.learn import (
    A2C,
    C51,
    CQL,
    DDPG,
    DQN,
    IQL,
    MAPPO,
    PPO,
    QRDQN,
    SAC,
    TD3,
    AdamOptimizerFactory,
    AutoAlpha,
    BehaviourCloning,
    C51Policy,
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    DiscreteActor,
    DiscreteActorPolicy,
    DiscreteCritic,
    DiscreteQLearningPolicy,
    DiscreteSAC,
    GaussianNoise,
    ImitationPolicy,
    JointCritic,
    LinearSchedule,
    LRSchedulerFactoryLinear,
    Net,
    NoisyLinear,
    OfflineTrainerParams,
    OffPolicyTrainerParams,
    OnPolicyTrainerParams,
    ProbabilisticActorPolicy,
    QRDQNPolicy,
    RecurrentBody,
    SACPolicy,
    ValueCritic,
)
from samplebatch.learn.networks import initialize_orthogonally
from samplebatch.rollout import Collector

Run = Callable[[], Act]


def _factories(task: Task, curve: Curve) -> list[Any]:
    return [curve.watch(task.make)] * task.envs


def _acting(policy: Any) -> Act:
    policy.eval()

    def act(obs: Any, state: Any) -> Any:
        with torch.no_grad():
            result = policy(Batch.stack([Batch(obs=obs)]), state)
        return policy.map_action(result.act)[0], result.get("state")

    return act


def _acting_in_team(policy: Any) -> Act:
    policy.eval()

    def act(obs: Any, state: Any) -> Any:
        with torch.no_grad():
            result = policy(Batch(obs=obs), None)
        return policy.map_action(result.act), None

    return act


def _buffer(task: Task, seed: int) -> Any:
    return VectorReplayBuffer(task.options["size"], task.envs, random_seed=seed)


def _off_policy(task: Task, curve: Curve, seed: int, algorithm: Any, buffer: Any, *, noise: bool) -> Run:
    options = task.options
    collector = Collector(
        algorithm.policy, _factories(task, curve), buffer=buffer, seed=seed, exploration_noise=noise, infos=False
    )

    def run() -> Act:
        collector.collect(n_step=options["start"], random=True)
        algorithm.run_training(
            OffPolicyTrainerParams(
                training_collector=collector,
                max_epochs=1,
                epoch_num_steps=task.steps - options["start"],
                collection_step_num_env_steps=options["every"],
                batch_size=options["batch"],
                update_step_num_gradient_steps_per_sample=options["updates"] / options["every"],
                verbose=False,
                show_progress=False,
            )
        )
        collector.close()
        return _acting(algorithm.policy)

    return run


def _q_learning(task: Task, curve: Curve, seed: int, buffer: Any) -> Run:
    env, options = task.make(), task.options
    explore = LinearSchedule(1.0, options["epsilon"], int(options["fraction"] * task.steps))
    body = Net.for_space(env.observation_space, task.hidden)
    policy = DiscreteQLearningPolicy(
        model=DiscreteCritic.for_space(body, env.action_space), action_space=env.action_space,
        observation_space=env.observation_space, eps_training=explore,
    )  # fmt: skip
    algorithm = DQN(
        policy=policy, optim=AdamOptimizerFactory(task.lr), gamma=task.gamma, target_update_freq=options["target"],
        is_double=False, huber_loss_delta=1.0,
    )  # fmt: skip
    return _off_policy(task, curve, seed, algorithm, buffer, noise=True)


def dqn(task: Task, curve: Curve, seed: int) -> Run:
    return _q_learning(task, curve, seed, _buffer(task, seed))


def her(task: Task, curve: Curve, seed: int) -> Run:
    options = task.options
    buffer = HERVectorReplayBuffer(
        options["size"], task.envs, compute_reward_fn=reached, horizon=options["horizon"], future_k=4,
        random_seed=seed,
    )  # fmt: skip
    return _q_learning(task, curve, seed, buffer)


def _critic(task: Task, env: Any) -> Any:
    return ContinuousCritic.for_space(env.observation_space, env.action_space, task.hidden)


def _soft(task: Task, kind: Any, **options: Any) -> Any:
    env, optim = task.make(), AdamOptimizerFactory(task.lr)
    actor = ContinuousActorProbabilistic.for_space(
        Net.for_space(env.observation_space, task.hidden), env.action_space, conditioned_sigma=True
    )
    return kind(
        policy=SACPolicy(actor=actor, action_space=env.action_space, observation_space=env.observation_space),
        policy_optim=optim, critic=_critic(task, env), critic2=_critic(task, env), critic_optim=optim,
        tau=task.options["tau"], gamma=task.gamma, alpha=AutoAlpha(-1.0, 0.0, optim), **options,
    )  # fmt: skip


def sac(task: Task, curve: Curve, seed: int, buffer: Any = None) -> Run:
    rows = _buffer(task, seed) if buffer is None else buffer
    return _off_policy(task, curve, seed, _soft(task, SAC), rows, noise=False)


def _deterministic_policy(task: Task) -> ContinuousDeterministicPolicy:
    env = task.make()
    return ContinuousDeterministicPolicy(
        actor=ContinuousActorDeterministic.for_space(
            Net.for_space(env.observation_space, task.hidden), env.action_space
        ),
        exploration_noise=GaussianNoise(sigma=task.options["noise"]), action_space=env.action_space,
        observation_space=env.observation_space,
    )  # fmt: skip


def td3(task: Task, curve: Curve, seed: int) -> Run:
    env, optim = task.make(), AdamOptimizerFactory(task.lr)
    algorithm = TD3(
        policy=_deterministic_policy(task), policy_optim=optim, critic=_critic(task, env), critic2=_critic(task, env),
        critic_optim=optim, tau=task.options["tau"], gamma=task.gamma,
    )  # fmt: skip
    return _off_policy(task, curve, seed, algorithm, _buffer(task, seed), noise=True)


def ddpg(task: Task, curve: Curve, seed: int) -> Run:
    env, optim = task.make(), AdamOptimizerFactory(task.lr)
    algorithm = DDPG(
        policy=_deterministic_policy(task), policy_optim=optim, critic=_critic(task, env), critic_optim=optim,
        tau=task.options["tau"], gamma=task.gamma,
    )  # fmt: skip
    return _off_policy(task, curve, seed, algorithm, _buffer(task, seed), noise=True)


def _distributional(task: Task, curve: Curve, seed: int, kind: Any, policy_class: Any, buffer: Any, **net: Any) -> Run:
    env, options = task.make(), task.options
    space = env.action_space
    model = Net(env.observation_space.shape, space.n, task.hidden, num_atoms=options["atoms"], **net)
    atoms = {"num_atoms": options["atoms"], "v_min": options["v_min"], "v_max": options["v_max"]}
    policy = policy_class(
        model=model, action_space=space, observation_space=env.observation_space,
        eps_training=LinearSchedule(1.0, options["epsilon"], int(options["fraction"] * task.steps)),
        **(atoms if kind is C51 else {}),
    )  # fmt: skip
    algorithm = kind(
        policy=policy, optim=AdamOptimizerFactory(task.lr), gamma=task.gamma, target_update_freq=options["target"],
        n_step_return_horizon=options["n_step"],
    )  # fmt: skip
    return _off_policy(task, curve, seed, algorithm, buffer, noise=True)


def c51(task: Task, curve: Curve, seed: int) -> Run:
    return _distributional(task, curve, seed, C51, C51Policy, _buffer(task, seed), softmax=True)


def qrdqn(task: Task, curve: Curve, seed: int) -> Run:
    return _distributional(task, curve, seed, QRDQN, QRDQNPolicy, _buffer(task, seed))


def rainbow(task: Task, curve: Curve, seed: int) -> Run:
    options = task.options
    buffer = PrioritizedVectorReplayBuffer(
        options["size"], task.envs, alpha=options["alpha"], beta=options["beta"], random_seed=seed
    )
    net: dict[str, Any] = {"softmax": True, "dueling_param": ({}, {}), "linear_layer": NoisyLinear}
    return _distributional(task, curve, seed, C51, C51Policy, buffer, **net)


def dsac(task: Task, curve: Curve, seed: int) -> Run:
    env, options, optim = task.make(), task.options, AdamOptimizerFactory(task.lr)
    space = env.action_space

    def body() -> Any:
        return Net.for_space(env.observation_space, task.hidden)

    policy = DiscreteActorPolicy(
        actor=DiscreteActor.for_space(body(), space), action_space=space, observation_space=env.observation_space,
        deterministic_eval=True,
    )  # fmt: skip
    algorithm = DiscreteSAC(
        policy=policy, policy_optim=optim, critic=DiscreteCritic.for_space(body(), space),
        critic2=DiscreteCritic.for_space(body(), space), critic_optim=optim, tau=options["tau"], gamma=task.gamma,
        alpha=options["alpha"], n_step_return_horizon=options["n_step"],
    )  # fmt: skip
    return _off_policy(task, curve, seed, algorithm, _buffer(task, seed), noise=False)


def _on_policy_params(task: Task, collector: Any) -> OnPolicyTrainerParams:
    return OnPolicyTrainerParams(
        training_collector=collector, max_epochs=1, epoch_num_steps=task.steps,
        collection_step_num_env_steps=task.envs * task.options["n_steps"],
        update_step_num_repetitions=task.options["epochs"], batch_size=task.options["batch"], verbose=False,
        show_progress=False,
    )  # fmt: skip


def _on_policy(task: Task, curve: Curve, seed: int, algorithm: Any) -> Run:
    step = task.envs * task.options["n_steps"]
    collector = Collector(
        algorithm.policy, _factories(task, curve), buffer=VectorReplayBuffer(step, task.envs), seed=seed, infos=False
    )
    params = _on_policy_params(task, collector)

    def run() -> Act:
        algorithm.run_training(params)
        collector.close()
        return _acting(algorithm.policy)

    return run


def _discrete_policy(task: Task, body: Any) -> DiscreteActorPolicy:
    env = task.make()
    return DiscreteActorPolicy(
        actor=DiscreteActor.for_space(body, env.action_space), action_space=env.action_space,
        observation_space=env.observation_space, deterministic_eval=True,
    )  # fmt: skip


def _actor_critic(task: Task, kind: Any, actor_body: Any, critic_body: Any, **arguments: Any) -> Any:
    options = task.options
    return kind(
        policy=_discrete_policy(task, actor_body), critic=ValueCritic(critic_body), optim=AdamOptimizerFactory(task.lr),
        ent_coef=options["entropy"], gamma=task.gamma, gae_lambda=options["lambda"], max_grad_norm=options["norm"],
        **arguments,
    )  # fmt: skip


def _tanh_body(task: Task) -> Any:
    return Net.for_space(task.make().observation_space, task.hidden, nn.Tanh)


def ppo(task: Task, curve: Curve, seed: int) -> Run:
    bodies = _tanh_body(task), _tanh_body(task)
    return _on_policy(task, curve, seed, _actor_critic(task, PPO, *bodies, eps_clip=task.options["clip"]))


def a2c(task: Task, curve: Curve, seed: int) -> Run:
    return _on_policy(task, curve, seed, _actor_critic(task, A2C, _tanh_body(task), _tanh_body(task)))


def cheetah(task: Task, curve: Curve, seed: int) -> Run:
    """Learn with PPO as `benchmarks.training.cleanrl` does, with our normalization."""
    env, options = task.make(), task.options
    actor = ContinuousActorProbabilistic.for_space(_tanh_body(task), env.action_space)
    critic = ValueCritic(_tanh_body(task))
    initialize_orthogonally(actor, head_gain=0.01)
    initialize_orthogonally(critic, head_gain=1.0)
    policy = ProbabilisticActorPolicy(
        actor=actor, action_space=env.action_space, observation_space=env.observation_space, deterministic_eval=True
    ).normalize_observations()
    schedule = LRSchedulerFactoryLinear(1, task.steps, options["n_steps"])
    algorithm = PPO(
        policy=policy, critic=critic, optim=AdamOptimizerFactory(task.lr, eps=1e-5).with_lr_scheduler_factory(schedule),
        eps_clip=options["clip"], value_clip=True, vf_coef=0.25, ent_coef=options["entropy"], gamma=task.gamma,
        gae_lambda=options["lambda"], max_grad_norm=options["norm"], normalize_rewards=True,
    )  # fmt: skip
    return _on_policy(task, curve, seed, algorithm)


def recurrent(task: Task, curve: Curve, seed: int) -> Run:
    space = task.make().observation_space
    body = RecurrentBody(space, task.options["state"], "lstm")
    # Separate bodies, because the critic's large errors would dominate the actor's gradients in a shared body.
    bodies = body, Net.for_space(space, task.hidden)
    return _on_policy(task, curve, seed, _actor_critic(task, PPO, *bodies, eps_clip=task.options["clip"]))


def mappo(task: Task, curve: Curve, seed: int) -> Run:
    from benchmarks.training.team import WatchedTeam

    env, options = task.make(), task.options
    spaces = [env.observation_space(agent) for agent in env.possible_agents]
    moves = env.action_space(env.possible_agents[0])
    actor = DiscreteActor.for_space(Net.for_space(spaces[0], task.hidden, nn.Tanh), moves)
    policy = DiscreteActorPolicy(actor=actor, action_space=moves, deterministic_eval=True)
    algorithm = MAPPO(
        policies={"agent": policy}, critic=JointCritic(spaces, task.hidden), optim=AdamOptimizerFactory(task.lr),
        eps_clip=options["clip"], ent_coef=options["entropy"], gamma=task.gamma, gae_lambda=options["lambda"],
        max_grad_norm=options["norm"],
    )  # fmt: skip
    step = task.envs * options["n_steps"]
    collector = MultiAgentCollector(
        algorithm.policy, lambda: WatchedTeam(task.make(), curve), MultiAgentReplayBuffer(step * task.agents),
        num_envs=task.envs, seed=seed, infos=False,
    )  # fmt: skip
    params = _on_policy_params(task, collector)

    def run() -> Act:
        algorithm.run_training(params)
        collector.close()
        return _acting_in_team(policy)

    return run


def _offline(task: Task, curve: Curve, algorithm: Any) -> Run:
    rows = load(task.options["data"])
    buffer = ReplayBuffer(rows.count)
    buffer.extend(rows)
    params = OfflineTrainerParams(
        buffer=buffer, max_epochs=1, epoch_num_steps=task.steps, batch_size=task.options["batch"], verbose=False,
        show_progress=False,
    )  # fmt: skip

    def run() -> Act:
        algorithm.run_training(params)
        curve.steps = task.steps
        return _acting(algorithm.policy)

    return run


def bc(task: Task, curve: Curve, seed: int) -> Run:
    env = task.make()
    actor = DiscreteActor.for_space(Net.for_space(env.observation_space, task.hidden), env.action_space)
    policy = ImitationPolicy(actor=actor, action_space=env.action_space, observation_space=env.observation_space)
    return _offline(task, curve, BehaviourCloning(policy=policy, optim=AdamOptimizerFactory(task.lr)))


def cql(task: Task, curve: Curve, seed: int) -> Run:
    return _offline(task, curve, _soft(task, CQL, cql_weight=task.options["weight"], with_lagrange=False))


def iql(task: Task, curve: Curve, seed: int) -> Run:
    env, optim = task.make(), AdamOptimizerFactory(task.lr)
    body = Net.for_space(env.observation_space, task.hidden)
    policy = ProbabilisticActorPolicy(
        actor=ContinuousActorProbabilistic.for_space(body, env.action_space, max_action=1.0),
        action_space=env.action_space, observation_space=env.observation_space, deterministic_eval=True,
    )  # fmt: skip
    algorithm = IQL(
        policy=policy, policy_optim=optim, critic=_critic(task, env), critic2=_critic(task, env), critic_optim=optim,
        value=ValueCritic(Net.for_space(env.observation_space, task.hidden)), tau=task.options["tau"],
        gamma=task.gamma,
    )  # fmt: skip
    return _offline(task, curve, algorithm)


RUNS = {
    "ppo": ppo, "a2c": a2c, "cheetah": cheetah, "recurrent": recurrent, "mappo": mappo, "dqn": dqn, "her": her,
    "sac": sac, "td3": td3, "bc": bc, "cql": cql, "iql": iql, "ddpg": ddpg, "c51": c51, "qrdqn": qrdqn,
    "rainbow": rainbow, "dsac": dsac,
}  # fmt: skip
