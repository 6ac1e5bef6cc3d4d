"""Recipes that create the algorithms of `samplebatch train` from settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from samplebatch import learn
from samplebatch.errors import ArgumentError, EnvironmentSpecError, near_names

if TYPE_CHECKING:
    from torch import nn

Space = Any
"""A Gymnasium space."""
Settings = Mapping[str, Any]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Recipe:
    """Description of an algorithm for the command line.

    - `summary`: short description of the algorithm.
    - `algorithm`: class of the algorithm; its arguments of plain types are settings.
    - `params`: parameter class of its trainer; its fields of plain types are settings.
    - `make`: function that creates the algorithm from spaces and settings.
    - `settings`: settings that are neither arguments nor fields, such as `lr`, and defaults that replace the defaults
      of `algorithm` and `params`.
    """

    summary: str
    algorithm: type[learn.Algorithm[Any]]
    params: type[learn.TrainerParams]
    make: Callable[[Space, Space, Settings], learn.Algorithm[Any]]
    settings: Settings

    @property
    def is_offline(self) -> bool:
        """Whether the algorithm learns only from recorded data."""
        return self.params is learn.OfflineTrainerParams

    def defaults(self) -> dict[str, Any]:
        """Return every setting with its default."""
        return _plain_arguments(self.algorithm) | _trainer_defaults(self.params) | dict(self.settings)


_MODULES = ("critic2", "critic2_optim")
"""Arguments with plain defaults that are not settings."""
_OF_TRAINERS = (
    "max_epochs",
    "epoch_num_steps",
    "test_step_num_episodes",
    "checkpoint_interval",
    "collection_step_num_env_steps",
    "collection_step_num_episodes",
    "batch_size",
    "update_step_num_repetitions",
    "update_step_num_gradient_steps_per_sample",
)
"""Parameters of trainers that are settings, if the trainer has them."""
_COMMON = {"hidden_sizes": [64, 64], "num_envs": 8, "max_epochs": 10, "test_step_num_episodes": 10, "threads": 1}
_IMAGES = {"stack_num": None, "ignore_obs_next": None, "save_only_last_obs": None, "compress": None, "random_shift": 0}
"""How buffers store observations, chosen by these if they are None, and the shift of sampled images in pixels."""
_OFF_POLICY = (
    _COMMON
    | _IMAGES
    | {
        "buffer_size": 100_000,
        "start_steps": 1000,
        "collection_step_num_env_steps": 8,
        "epoch_num_steps": 5000,
        "normalize": False,
    }
)
_ASYNCHRONOUS = _COMMON | {
    "normalize": False,
    "num_envs": 16,
    "batch_size": 256,
    "epoch_num_steps": 10_240,
    "collection_step_num_env_steps": 512,
    "ent_coef": 0.003,
    "max_grad_norm": 0.5,
    "advantage_normalization": True,
    "max_lag": None,
}
_ONE_STEP = {"hidden_sizes": [256, 256], "num_envs": 1, "collection_step_num_env_steps": 1}
_Q_LEARNING = _OFF_POLICY | {
    "lr": 1e-3,
    "hidden_sizes": [128, 128],
    "is_dueling": False,
    "is_noisy": False,
    "eps_start": 1.0,
    "eps_end": 0.05,
    "eps_steps": 10_000,
    "n_step_return_horizon": 3,
    "target_update_freq": 250,
    "max_grad_norm": 10.0,
    "update_step_num_gradient_steps_per_sample": 0.5,
    "prioritized_alpha": 0.0,
    "prioritized_beta": 0.4,
}
_ATOMS = {"num_atoms": 51, "v_min": -10.0, "v_max": 100.0}
"""Atoms of the return, for CartPole, whose discounted returns reach 100, and for rewards clipped to [-1, 1]."""
_OFFLINE = _COMMON | {"epoch_num_steps": 1000, "batch_size": 256}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of an algorithm.

    >>> find_recipe("sac").summary
    'soft actor-critic, for continuous actions'
    >>> find_recipe("dpn")
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: there is no algorithm 'dpn'; did you mean 'dqn'?
    """
    if name not in RECIPES:
        is_swapped = "/" in name or "-v" in name
        hint = "the order is: train ALGORITHM ENVIRONMENT" if is_swapped else near_names(name, RECIPES)
        raise ArgumentError(f"there is no algorithm {name!r}; {hint}")
    return RECIPES[name]


def complete_settings(name: str, overrides: Settings) -> dict[str, Any]:
    """Return all settings of an algorithm; settings that are not in `overrides` have their default values.

    >>> complete_settings("dqn", {"lr": 1})["lr"]
    1.0
    >>> complete_settings("dqn", {"gama": 0.9})
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: dqn has no setting 'gama'; did you mean 'gamma'?
    """
    settings = find_recipe(name).defaults()
    for setting, value in overrides.items():
        if setting not in settings:
            raise ArgumentError(f"{name} has no setting {setting!r}; {near_names(setting, settings)}")
        settings[setting] = _as_type_of(settings[setting], value, setting)
    return settings


def _as_type_of(default: Any, value: Any, name: str) -> Any:
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if default is None or value is None or type(value) is type(default):
        return value
    raise ArgumentError(f"setting {name!r} must be of type {type(default).__name__}, got {type(value).__name__}")


def _plain_arguments(cls: type) -> dict[str, Any]:
    """Return the arguments of a class and its base class that have a default of a plain type."""
    arguments: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = signature(vars(base)["__init__"]).parameters.values()
            for parameter in parameters:
                if isinstance(parameter.default, _PLAIN) and parameter.name not in _MODULES:
                    arguments.setdefault(parameter.name, parameter.default)
            if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in parameters):
                break
    return arguments


def _trainer_defaults(params: type[learn.TrainerParams]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(params) if field.name in _OF_TRAINERS}


def _arguments(cls: type, settings: Settings) -> dict[str, Any]:
    return {name: settings[name] for name in _plain_arguments(cls) if name in settings}


def _body(space: Space, settings: Settings, **layers: Any) -> nn.Module:
    if len(space.shape or ()) == 3:
        return learn.Convolutional(space, **layers)
    return learn.Net.for_space(space, settings["hidden_sizes"], **layers)


def _optim(settings: Settings) -> learn.AdamOptimizerFactory:
    return learn.AdamOptimizerFactory(lr=settings["lr"])


def _spaces(obs: Space, act: Space) -> dict[str, Any]:
    return {"observation_space": obs, "action_space": act}


def _is_discrete(act: Space) -> bool:
    return hasattr(act, "n") and not act.shape


def _check_continuous(act: Space, name: str) -> None:
    if _is_discrete(act):
        raise EnvironmentSpecError(f"actions must be continuous for {name}, got {act}")


def _check_discrete(act: Space, name: str) -> None:
    if not _is_discrete(act):
        raise EnvironmentSpecError(f"actions must be discrete for {name}, got {act}")


def _actor(obs: Space, act: Space, settings: Settings) -> nn.Module:
    head = learn.ContinuousActorProbabilistic if hasattr(act, "low") else learn.DiscreteActor
    return head.for_space(_body(obs, settings), act)


def _actor_policy(obs: Space, act: Space, settings: Settings) -> learn.ProbabilisticActorPolicy:
    return learn.ProbabilisticActorPolicy(
        actor=_actor(obs, act, settings), deterministic_eval=True, **_spaces(obs, act)
    )


def _set_normalization(policy: Any, settings: Settings) -> None:
    if settings.get("normalize"):
        policy.normalize_observations()


def _make_actor_critic(cls: Any) -> Callable[[Space, Space, Settings], Any]:
    def make(obs: Space, act: Space, settings: Settings) -> Any:
        critic = learn.ValueCritic(_body(obs, settings))
        policy = _actor_policy(obs, act, settings)
        _set_normalization(policy, settings)
        arguments = _arguments(cls, settings)
        arguments["normalize_rewards"] |= settings["normalize"]
        return cls(policy=policy, critic=critic, optim=_optim(settings), **arguments)

    return make


def _make_reinforce(obs: Space, act: Space, settings: Settings) -> learn.Reinforce:
    policy = _actor_policy(obs, act, settings)
    return learn.Reinforce(policy=policy, optim=_optim(settings), **_arguments(learn.Reinforce, settings))


def _make_q_learning(cls: Any, policy_class: Any) -> Callable[[Space, Space, Settings], Any]:
    """Return a factory of Q-learning algorithms, whose critics output values, atoms or quantiles."""

    def make(obs: Space, act: Space, settings: Settings) -> Any:
        _check_discrete(act, cls.__name__.lower())
        layers: dict[str, Any] = {"linear_layer": learn.NoisyLinear} if settings["is_noisy"] else {}
        head = learn.DuelingCritic if settings["is_dueling"] else learn.DiscreteCritic
        atoms = settings.get("num_atoms") or settings.get("num_quantiles") or 1
        policy = policy_class(
            model=head.for_space(_body(obs, settings, **layers), act, num_atoms=atoms, **layers),
            eps_training=learn.LinearSchedule(settings["eps_start"], settings["eps_end"], settings["eps_steps"]),
            **{name: settings[name] for name in ("num_atoms", "v_min", "v_max") if name in settings},
            **_spaces(obs, act),
        )
        _set_normalization(policy, settings)
        return cls(policy=policy, optim=_optim(settings), **_arguments(cls, settings))

    return make


def _make_deterministic(cls: Any) -> Callable[[Space, Space, Settings], Any]:
    def make(obs: Space, act: Space, settings: Settings) -> Any:
        _check_continuous(act, cls.__name__.lower())
        policy = learn.ContinuousDeterministicPolicy(
            actor=learn.ContinuousActorDeterministic.for_space(_body(obs, settings), act),
            exploration_noise=learn.GaussianNoise(sigma=settings["noise_sigma"]),
            **_spaces(obs, act),
        )
        _set_normalization(policy, settings)
        critics = _critics(obs, act, settings, 1 if cls is learn.DDPG else 2)
        return cls(policy=policy, policy_optim=_optim(settings), **critics, **_arguments(cls, settings))

    return make


def _critics(obs: Space, act: Space, settings: Settings, count: int = 2) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in ("critic", "critic2")[:count]:
        arguments[name] = learn.ContinuousCritic.for_space(obs, act, settings["hidden_sizes"])
        arguments[f"{name}_optim"] = _optim(settings)
    return arguments


def _make_soft(cls: Any) -> Callable[[Space, Space, Settings], Any]:
    def make(obs: Space, act: Space, settings: Settings) -> Any:
        _check_continuous(act, cls.__name__.lower())
        actor = learn.ContinuousActorProbabilistic.for_space(_body(obs, settings), act, conditioned_sigma=True)
        alpha = settings["alpha"]
        if settings["learn_alpha"]:
            alpha = learn.AutoAlpha(-float(act.shape[0]), 0.0, _optim(settings))
        arguments = _arguments(cls, settings) | {"alpha": alpha}
        policy = learn.SACPolicy(actor=actor, **_spaces(obs, act))
        _set_normalization(policy, settings)
        return cls(policy=policy, policy_optim=_optim(settings), **_critics(obs, act, settings), **arguments)

    return make


def _make_discrete_sac(obs: Space, act: Space, settings: Settings) -> learn.DiscreteSAC:
    _check_discrete(act, "dsac")
    alpha = settings["alpha"]
    if settings["learn_alpha"]:
        alpha = learn.AutoAlpha(settings["target_entropy_ratio"] * math.log(act.n), 0.0, _optim(settings))
    actor = learn.DiscreteActor.for_space(_body(obs, settings), act)
    critics = [learn.DiscreteCritic.for_space(_body(obs, settings), act) for _ in range(2)]
    policy = learn.DiscreteSACPolicy(actor=actor, **_spaces(obs, act))
    _set_normalization(policy, settings)
    return learn.DiscreteSAC(
        policy=policy,
        policy_optim=_optim(settings),
        critic=critics[0],
        critic2=critics[1],
        critic_optim=_optim(settings),
        **_arguments(learn.DiscreteSAC, settings) | {"alpha": alpha},
    )


def _make_cloning(obs: Space, act: Space, settings: Settings) -> learn.BehaviourCloning:
    head = learn.DiscreteActor if _is_discrete(act) else learn.ContinuousActorDeterministic
    actor = head.for_space(_body(obs, settings), act)
    policy = learn.ImitationPolicy(actor=actor, action_scaling=not _is_discrete(act), **_spaces(obs, act))
    return learn.BehaviourCloning(policy=policy, optim=_optim(settings), **_arguments(learn.BehaviourCloning, settings))


def _make_bcq(obs: Space, act: Space, settings: Settings) -> learn.DiscreteBCQ:
    _check_discrete(act, "bcq")
    policy = learn.DiscreteBCQPolicy(
        model=learn.DiscreteCritic.for_space(_body(obs, settings), act),
        imitator=learn.DiscreteActor.for_space(_body(obs, settings), act),
        unlikely_action_threshold=settings["unlikely_action_threshold"],
        **_spaces(obs, act),
    )
    return learn.DiscreteBCQ(policy=policy, optim=_optim(settings), **_arguments(learn.DiscreteBCQ, settings))


def _make_iql(obs: Space, act: Space, settings: Settings) -> learn.IQL:
    if _is_discrete(act):
        policy = _actor_policy(obs, act, settings)
        heads = {name: learn.DiscreteCritic.for_space(_body(obs, settings), act) for name in ("critic", "critic2")}
        critics: dict[str, Any] = heads | {"critic_optim": _optim(settings)}
    else:
        _check_continuous(act, "iql")
        # Means are bounded like the actions in the data.
        head = learn.ContinuousActorProbabilistic.for_space(_body(obs, settings), act, max_action=1.0)
        policy = learn.ProbabilisticActorPolicy(actor=head, deterministic_eval=True, **_spaces(obs, act))
        critics = _critics(obs, act, settings)
    value = learn.ValueCritic(_body(obs, settings))
    return learn.IQL(
        policy=policy, policy_optim=_optim(settings), value=value, **critics, **_arguments(learn.IQL, settings)
    )


RECIPES: Mapping[str, Recipe] = {
    "ppo": Recipe(
        "proximal policy optimization, for any actions",
        learn.PPO,
        learn.OnPolicyTrainerParams,
        _make_actor_critic(learn.PPO),
        _COMMON
        | {
            "lr": 1e-3,
            "normalize": False,
            "num_envs": 16,
            "batch_size": 256,
            "epoch_num_steps": 10_240,
            "update_step_num_repetitions": 6,
            "ent_coef": 0.003,
            "max_grad_norm": 0.5,
        },
    ),
    "a2c": Recipe(
        "advantage actor-critic, for any actions",
        learn.A2C,
        learn.OnPolicyTrainerParams,
        _make_actor_critic(learn.A2C),
        _COMMON
        | {
            "lr": 1e-3,
            "normalize": False,
            "num_envs": 16,
            "batch_size": None,
            "epoch_num_steps": 10_240,
            "collection_step_num_env_steps": 256,
            "max_grad_norm": 0.5,
        },
    ),
    "impala": Recipe(
        "importance-weighted actor-learner with V-trace, for any actions; with --workers, they never wait",
        learn.IMPALA,
        learn.OnPolicyTrainerParams,
        _make_actor_critic(learn.IMPALA),
        _ASYNCHRONOUS | {"lr": 7e-4, "collection_step_num_env_steps": 256, "gae_lambda": 0.95},
    ),
    "appo": Recipe(
        "asynchronous proximal policy optimization, for any actions; with --workers, they never wait",
        learn.APPO,
        learn.OnPolicyTrainerParams,
        _make_actor_critic(learn.APPO),
        _ASYNCHRONOUS | {"lr": 1e-3, "update_step_num_repetitions": 4},
    ),
    "reinforce": Recipe(
        "the policy gradient, for any actions",
        learn.Reinforce,
        learn.OnPolicyTrainerParams,
        _make_reinforce,
        _COMMON | {"lr": 3e-3, "batch_size": None, "epoch_num_steps": 10_240, "return_standardization": True},
    ),
    "dqn": Recipe(
        "deep Q-learning, for discrete actions",
        learn.DQN,
        learn.OffPolicyTrainerParams,
        _make_q_learning(learn.DQN, learn.DiscreteQLearningPolicy),
        _Q_LEARNING,
    ),
    "c51": Recipe(
        "categorical deep Q-learning, for discrete actions",
        learn.C51,
        learn.OffPolicyTrainerParams,
        _make_q_learning(learn.C51, learn.C51Policy),
        _Q_LEARNING | _ATOMS,
    ),
    "qrdqn": Recipe(
        "deep Q-learning by quantile regression, for discrete actions",
        learn.QRDQN,
        learn.OffPolicyTrainerParams,
        _make_q_learning(learn.QRDQN, learn.QRDQNPolicy),
        _Q_LEARNING | {"num_quantiles": 51},
    ),
    "rainbow": Recipe(
        "Rainbow: c51 with prioritized replay, and a dueling network that explores by noise on its weights",
        learn.C51,
        learn.OffPolicyTrainerParams,
        _make_q_learning(learn.C51, learn.C51Policy),
        _Q_LEARNING
        | _ATOMS
        | {"is_dueling": True, "is_noisy": True, "eps_start": 0.0, "eps_end": 0.0, "prioritized_alpha": 0.5},
    ),
    "td3": Recipe(
        "twin delayed deep deterministic policy gradients, for continuous actions",
        learn.TD3,
        learn.OffPolicyTrainerParams,
        _make_deterministic(learn.TD3),
        _OFF_POLICY | _ONE_STEP | {"lr": 1e-3, "noise_sigma": 0.1},
    ),
    "ddpg": Recipe(
        "deep deterministic policy gradient, for continuous actions",
        learn.DDPG,
        learn.OffPolicyTrainerParams,
        _make_deterministic(learn.DDPG),
        _OFF_POLICY | _ONE_STEP | {"lr": 1e-3, "noise_sigma": 0.1},
    ),
    "sac": Recipe(
        "soft actor-critic, for continuous actions",
        learn.SAC,
        learn.OffPolicyTrainerParams,
        _make_soft(learn.SAC),
        _OFF_POLICY | _ONE_STEP | {"lr": 1e-3, "alpha": 0.2, "learn_alpha": True},
    ),
    "dsac": Recipe(
        "soft actor-critic, for discrete actions",
        learn.DiscreteSAC,
        learn.OffPolicyTrainerParams,
        _make_discrete_sac,
        _OFF_POLICY
        | {
            "lr": 1e-3,
            "hidden_sizes": [128, 128],
            "alpha": 0.05,
            "learn_alpha": False,
            "target_entropy_ratio": 0.3,
            "n_step_return_horizon": 3,
            "update_step_num_gradient_steps_per_sample": 0.5,
        },
    ),
    "bc": Recipe(
        "behaviour cloning, from data",
        learn.BehaviourCloning,
        learn.OfflineTrainerParams,
        _make_cloning,
        _OFFLINE | {"lr": 1e-3},
    ),
    "bcq": Recipe(
        "batch-constrained Q-learning, from data with discrete actions",
        learn.DiscreteBCQ,
        learn.OfflineTrainerParams,
        _make_bcq,
        _OFFLINE | {"lr": 1e-3, "unlikely_action_threshold": 0.3, "target_update_freq": 200},
    ),
    "cql": Recipe(
        "conservative Q-learning, from data with continuous actions",
        learn.CQL,
        learn.OfflineTrainerParams,
        _make_soft(learn.CQL),
        _OFFLINE | {"lr": 3e-4, "hidden_sizes": [256, 256], "alpha": 0.2, "learn_alpha": True, "calibrated": False},
    ),
    "iql": Recipe(
        "implicit Q-learning, from data",
        learn.IQL,
        learn.OfflineTrainerParams,
        _make_iql,
        _OFFLINE | {"lr": 3e-4, "hidden_sizes": [256, 256]},
    ),
}
"""Every algorithm of the command line, by name."""


def make_algorithm(name: str, obs: Space, act: Space, settings: Settings) -> learn.Algorithm[Any]:
    """Create an algorithm from its complete settings."""
    return find_recipe(name).make(obs, act, settings)


def trainer_arguments(name: str, settings: Settings) -> dict[str, Any]:
    """Select the settings that are parameters of the trainer."""
    return {field: settings[field] for field in _trainer_defaults(find_recipe(name).params)}
