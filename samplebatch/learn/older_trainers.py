"""Trainer functions of Tianshou before version 1, for existing scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samplebatch.arguments import suggest_names
from samplebatch.errors import ArgumentError
from samplebatch.learn import trainer
from samplebatch.loggers.logger import TensorboardLogger


@suggest_names(epoch="max_epoch", max_epochs="max_epoch", repeat="repeat_per_collect")
def onpolicy_trainer(
    policy: Any,
    train_collector: Any,
    test_collector: Any,
    max_epoch: int,
    step_per_epoch: int,
    repeat_per_collect: int,
    episode_per_test: int,
    batch_size: int,
    collect_per_step: int | None = None,
    step_per_collect: int | None = None,
    episode_per_collect: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train an on-policy algorithm, with the arguments of Tianshou 0.2 to 0.5.

    Parameters
    ----------
    policy
        The algorithm, such as a `PPO`; early versions called it a policy.
    train_collector, test_collector
        The collectors.
    max_epoch, step_per_epoch, episode_per_test
        Epochs, environment steps per epoch, and episodes per test.
    repeat_per_collect, batch_size
        Number of passes of an update over the collected steps, and number of rows per gradient step.
    collect_per_step, episode_per_collect
        Episodes collected before each update; `collect_per_step` is the name in version 0.2.
    step_per_collect
        Environment steps collected before each update, instead of episodes.
    **options
        `train_fn`, `test_fn`, `stop_fn`, `save_fn`, `save_checkpoint_fn`, `reward_metric`, `test_in_train`, `logger`,
        `writer`, `resume_from_log`, `verbose`, `show_progress`. Functions have the signatures in `TrainerParams`,
        except that `save_fn` is called with the policy.

    Returns
    -------
    dict
        `best_reward`, `best_result`, `train_step`, `train_episode`, `test_step`, `test_episode`, `duration` and
        `train_speed`.

    Raises
    ------
    ArgumentError
        If an argument is unknown, the algorithm is off-policy, or not exactly one collection amount is passed.
    """
    if collect_per_step is not None:
        episode_per_collect = collect_per_step
    params = trainer.OnPolicyTrainerParams(
        training_collector=train_collector,
        collection_step_num_env_steps=step_per_collect,
        collection_step_num_episodes=episode_per_collect,
        update_step_num_repetitions=repeat_per_collect,
        batch_size=batch_size,
        **_common(test_collector, max_epoch, step_per_epoch, episode_per_test, options),
    )
    return _result(trainer.OnPolicyTrainer(_algorithm_of(policy), params).run())


@suggest_names(epoch="max_epoch", max_epochs="max_epoch")
def offpolicy_trainer(
    policy: Any,
    train_collector: Any,
    test_collector: Any,
    max_epoch: int,
    step_per_epoch: int,
    collect_per_step: int | None = None,
    episode_per_test: int = 1,
    batch_size: int = 64,
    update_per_step: float = 1,
    step_per_collect: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train an off-policy algorithm, with the arguments of Tianshou 0.2 to 0.5.

    Parameters
    ----------
    policy
        The algorithm, such as a `DQN`; early versions called it a policy.
    train_collector, test_collector
        The collectors.
    max_epoch, step_per_epoch, episode_per_test
        Epochs, environment steps per epoch, and episodes per test.
    collect_per_step, step_per_collect
        Environment steps collected before each update. Version 0.2 names this argument `collect_per_step`. In
        version 0.2, an epoch has `step_per_epoch` updates.
    batch_size
        Rows per gradient step.
    update_per_step
        Gradient steps per environment step; if `collect_per_step` is passed, gradient steps per collection.
    **options
        See `onpolicy_trainer`.

    Returns
    -------
    dict
        See `onpolicy_trainer`.

    Raises
    ------
    ArgumentError
        If an argument is unknown, or not exactly one collection amount is passed.
    """
    if (collect_per_step is None) == (step_per_collect is None):
        raise ArgumentError(
            "exactly one of collect_per_step and step_per_collect must be passed, got "
            f"{collect_per_step} and {step_per_collect}"
        )
    if collect_per_step is not None:
        step_per_epoch, update_per_step = step_per_epoch * collect_per_step, update_per_step / collect_per_step
        step_per_collect = collect_per_step
    params = trainer.OffPolicyTrainerParams(
        training_collector=train_collector,
        collection_step_num_env_steps=step_per_collect,
        update_step_num_gradient_steps_per_sample=update_per_step,
        batch_size=batch_size,
        **_common(test_collector, max_epoch, step_per_epoch, episode_per_test, options),
    )
    return _result(trainer.OffPolicyTrainer(_algorithm_of(policy), params).run())


_PARAM_NAMES = {
    "train_fn": "training_fn",
    "test_fn": "test_fn",
    "stop_fn": "stop_fn",
    "save_checkpoint_fn": "save_checkpoint_fn",
    "reward_metric": "multi_agent_return_reduction",
    "test_in_train": "test_in_training",
    "logger": "logger",
    "resume_from_log": "resume_from_log",
    "verbose": "verbose",
    "show_progress": "show_progress",
}
"""Names of arguments in `TrainerParams`."""
_IGNORED = ("log_interval",)


def _common(
    test_collector: Any, max_epoch: int, step_per_epoch: int, episode_per_test: Any, options: dict[str, Any]
) -> dict[str, Any]:
    save: Callable[[Any], None] | None = options.pop("save_fn", None) or options.pop("save_best_fn", None)
    writer = options.pop("writer", None)
    if writer is not None:
        options.setdefault("logger", TensorboardLogger(writer))
    params: dict[str, Any] = {
        "test_collector": test_collector,
        "max_epochs": max_epoch,
        "epoch_num_steps": step_per_epoch,
        "test_step_num_episodes": sum(episode_per_test) if isinstance(episode_per_test, list) else episode_per_test,
    }
    if save is not None:
        params["save_best_fn"] = lambda algorithm: save(algorithm.policy)
    return params | {_PARAM_NAMES.get(name, name): value for name, value in options.items() if name not in _IGNORED}


def _algorithm_of(policy: Any) -> Any:
    algorithm = getattr(policy, "_learner", (policy,))[0]
    if not callable(getattr(algorithm, "update", None)):
        raise ArgumentError(
            f"policy must be an algorithm such as DQN(policy=..., optim=...), got a {type(policy).__name__}"
        )
    return algorithm


def _result(info: trainer.InfoStats) -> dict[str, Any]:
    """Return the result with the keys of early versions."""
    timing = info.timing
    return {
        "best_reward": info.best_reward,
        "best_result": f"{info.best_reward:.2f} ± {info.best_reward_std:.2f}",
        "train_step": info.train_step,
        "train_episode": info.train_episode,
        "test_step": info.test_step,
        "test_episode": info.test_episode,
        "duration": f"{timing.total_time:.2f}s",
        "train_speed": f"{timing.update_speed:.2f} step/s",
    }
