"""Command `samplebatch train`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from samplebatch import learn
from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.prioritized import PrioritizedVectorReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.vector import VectorReplayBuffer
from samplebatch.cli.curves import LOG, draw_curves, draw_text
from samplebatch.cli.recipes import RECIPES, complete_settings, find_recipe, make_algorithm, trainer_arguments
from samplebatch.cli.report import check_picture
from samplebatch.cli.terminal import FAILED, Interruption, console, say
from samplebatch.convert.experience import open_source
from samplebatch.env.registry import imports_module, make_environment
from samplebatch.errors import ArgumentError, EnvironmentSpecError, FormatError
from samplebatch.learn.checkpoint import read_checkpoint, write_torch
from samplebatch.loggers.training_log import TrainingLog, learning_curves, read_log
from samplebatch.rollout.collector import Collector, leave_out_environments
from samplebatch.storage.files import replacing
from samplebatch.storage.saving import load
from samplebatch.workers.workers import RolloutWorkers

CONFIG, _LOG, _POLICY = "train.toml", LOG, "policy.pt"
_POINTS = 1000
"""Approximate number of points of a learning curve; other metrics are not logged."""
_OWN = ("algorithm", "source", "env", "seed", "seeds", "parallel", "workers")
"""Names in a config file that are not settings of the algorithm."""
_LENGTH = ("max_epochs", "epoch_num_steps")
"""Settings whose product is the length of a run, set by `steps`; epoch_num_steps changes as little as possible."""


@dataclass(frozen=True)
class Training:
    """Options of `samplebatch train`, read from flags, from a file, or from the resumed run.

    - `algorithm`, `source`: name of the algorithm, and the environment or data from which it learns.
    - `env`: test environment, if the source is data.
    - `seed`, `workers`: seed of the run, and number of rollout worker processes.
    - `settings`: all settings of the algorithm.
    - `seeds`, `parallel`: number of runs (None for a single run), and number of concurrent runs (None for one per
      processor). The seeds of the runs are `seed`, `seed + 1` and so on.
    """

    algorithm: str
    source: str
    env: str | None
    seed: int
    workers: int
    settings: Mapping[str, Any]
    seeds: int | None = None
    parallel: int | None = None

    @property
    def environment(self) -> str | None:
        """Name of the training environment, or of the test environment if the source is data."""
        return self.env if find_recipe(self.algorithm).is_offline else self.source

    def as_toml(self) -> str:
        """Format the options as a TOML file for `--config`."""
        options = {name: getattr(self, name) for name in _OWN} | dict(self.settings)
        # Numbers, strings and lists have the same syntax in JSON and TOML.
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items() if value is not None)


def read_training(
    config: Path | None, flags: Mapping[str, Any], assignments: Sequence[str], *, allow_pickle: bool = False
) -> Training:
    """Merge options from a file, flags and `--set`, in ascending order of precedence.

    A name that imports a module can execute arbitrary code. A file may contain the name of a module to import only with
    `allow_pickle`, or if a flag repeats the name.

    >>> found = read_training(
    ...     None, {"algorithm": "dqn", "source": "CartPole-v1", "steps": 9000}, ["lr=1e-4"]
    ... )
    >>> [found.settings[name] for name in ("lr", "max_epochs", "epoch_num_steps")]
    [0.0001, 2, 4500]
    """
    options = {} if config is None else read_toml(config)
    typed = {name: value for name, value in flags.items() if value is not None} | dict(map(_assignment, assignments))
    options |= typed
    steps = options.pop("steps", None)
    named = {"env": None, "seed": 0, "workers": 0} | {name: options.pop(name) for name in _OWN if name in options}
    for name in ("algorithm", "source"):
        if named.get(name) is None:
            raise ArgumentError(f"{name} must be passed as an argument or in the file, got neither")
    for name in ("algorithm", "source", "env"):
        if not isinstance(named[name], str | None):
            raise ArgumentError(f"{name} must be a string, got a {type(named[name]).__name__}")
    for name in ("seed", "workers"):
        named[name] = whole(name, named[name])
    for name in ("seeds", "parallel"):
        if named.get(name) is not None:
            named[name] = whole(name, named[name], 1)
    if named.get("parallel") is not None and named.get("seeds") is None:
        raise ArgumentError("seeds must be passed with parallel, got None")
    settings = complete_settings(str(named["algorithm"]), options)
    if steps is not None:
        if conflicting := typed.keys() & _LENGTH:
            raise ArgumentError(
                f"steps must be passed without {' and '.join(sorted(conflicting))}, which it sets, got both"
            )
        epochs = max(1, round(whole("steps", steps, 1) / settings["epoch_num_steps"]))
        settings |= {"max_epochs": epochs, "epoch_num_steps": -(-steps // epochs)}
    training = Training(settings=settings, **named)
    env, option = training.environment, "env" if find_recipe(training.algorithm).is_offline else "source"
    if env is not None and option not in typed and not allow_pickle and imports_module(env):
        raise ArgumentError(
            f"{option} must be the id of a registered environment in {str(config)!r}, got {env!r}, "
            f"which imports a module; repeat {env!r} on the command line, or add --allow-pickle if you trust the "
            "file's writer"
        )
    return training


def read_toml(path: Path) -> dict[str, Any]:
    """Read the settings in a file.

    Raises FormatError if the file is not valid TOML or contains tables.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{str(path)!r} must be a TOML file: {error}") from error
    for name, value in document.items():
        if isinstance(value, dict):
            raise FormatError(f"{str(path)!r} must have only settings NAME = VALUE, got a table [{name}]")
    return document


def _assignment(text: str) -> tuple[str, Any]:
    """Parse `name=value`; a value that is not valid TOML is a string.

    >>> _assignment("hidden_sizes=[64, 64]"), _assignment("env=CartPole-v1")
    (('hidden_sizes', [64, 64]), ('env', 'CartPole-v1'))
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentError(f"--set must have the form NAME=VALUE, got {text!r}")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def show_settings(algorithm: str | None) -> int:
    """Print the settings of an algorithm, or the list of all algorithms; return the exit status."""
    if algorithm is None:
        for name, recipe in RECIPES.items():
            say(f"{name}: {recipe.summary}")
        return 0
    for name, value in sorted(find_recipe(algorithm).defaults().items()):
        say(f"{name} = {json.dumps(value)}" if value is not None else f"# {name} is not set")
    return 0


def new_folder(training: Training, folder: Path | None, content: str) -> Path:
    """Return the folder of a new run; the default folder name contains the names of the algorithm and the source.

    Raises ArgumentError if the folder contains a file or folder named `content`.
    """
    target = folder or Path("runs") / f"{training.algorithm}-{Path(training.source).name.replace(':', '-')}"
    if (target / content).exists():
        raise ArgumentError(
            f"{str(target)!r} must not contain a run, got one; resume it with --resume {target}, or give another --out"
        )
    return target


def read_resumed(folder: Path, flags: Mapping[str, Any], *, allow_pickle: bool = False) -> Training:
    """Return the options of the run in a folder.

    Raises ArgumentError if a flag contradicts the run's options.
    """
    config = folder / CONFIG
    options = read_toml(config)
    for name, value in flags.items():
        if value is not None and value != options.get(name):
            raise ArgumentError(f"{name} must be {options.get(name)!r}, the value in {str(config)!r}, got {value!r}")
    return read_training(config, flags, (), allow_pickle=allow_pickle)


def write_config(training: Training, folder: Path) -> None:
    """Create the folder of a run, and write the options of the run to a file in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / CONFIG) as file:
        file.write(training.as_toml().encode())


def allow_imports(training: Training, *, allow_pickle: bool = False) -> None:
    """Allow the run to import modules from the current directory, if the run's options permit imports."""
    environment = training.environment
    if allow_pickle or (environment is not None and imports_module(environment)):
        # A console script has its own folder on sys.path, not the current directory.
        sys.path.insert(0, os.getcwd())


def run_training(
    training: Training,
    folder: Path,
    *,
    is_resumed: bool,
    plot: Path | None = None,
    shows_curves: bool = True,
    allow_pickle: bool = False,
) -> int:
    """Start a training run in a folder, or resume the run in the folder; return the exit status."""
    allow_imports(training, allow_pickle=allow_pickle)
    if plot is not None:
        check_picture(plot)
    _seed(training)
    with contextlib.ExitStack() as stack:
        trainer = make_trainer(training, folder, stack, allow_pickle=allow_pickle)
        if is_resumed:
            state = read_checkpoint(folder, allow_pickle=allow_pickle)
            if state["why_reset"] is None and state["collectors"] and not allow_pickle:
                state["why_reset"] = "they are pickled, and --allow-pickle is not there"
            if not allow_pickle:
                # A registered environment is created from its id: everything but unfinished episodes is restored.
                state["collectors"] = {
                    name: leave_out_environments(collector_state, state["why_reset"])
                    for name, collector_state in state["collectors"].items()
                }
            trainer.load_state_dict(state, allow_pickle=allow_pickle)
            say(f"Resumed in epoch {trainer.counters.epoch}.")
            if state["why_reset"] is not None:
                say(f"Environments begin new episodes: {state['why_reset']}")
        else:
            write_config(training, folder)
            _fill(training, trainer)
        with Interruption(trainer.request_stop) as interruption:
            info = trainer.run()
    if shows_curves:
        show_run(folder, plot)
    steps = f"{info.train_step} environment steps and " if info.train_step else ""
    if not trainer.is_done:
        say(f"Interrupted after {steps}{info.gradient_step} gradient steps.", stderr=True)
        say(f"Resume with: samplebatch train --resume {folder} --allow-pickle", stderr=True)
        return interruption.status or FAILED
    best = (
        f" Best mean return of a test: {info.best_reward:.4g} ± {info.best_reward_std:.4g}."
        if info.test_episode
        else ""
    )
    say(f"Trained for {steps}{info.gradient_step} gradient steps in {info.timing.total_time:.0f} s.{best}")
    say(f"Wrote the policy to {folder / _POLICY}, its metrics to {folder / _LOG}")
    return 0


def _seed(training: Training) -> None:
    import torch

    torch.set_num_threads(training.settings["threads"])
    torch.manual_seed(training.seed)
    np.random.seed(training.seed)
    random.seed(training.seed)


def make_trainer(
    training: Training, folder: Path, stack: contextlib.ExitStack, *, allow_pickle: bool = False
) -> learn.Trainer[Any]:
    """Create the trainer; closing the stack closes the environments and workers of the trainer."""
    recipe, settings = find_recipe(training.algorithm), training.settings
    test_env = training.environment
    rows = _open_rows(training.source, allow_pickle=allow_pickle) if recipe.is_offline else None
    obs_space, act_space = infer_spaces(rows) if test_env is None else _spaces_of(test_env, settings)
    if rows is not None and test_env is not None:
        _check_shapes(rows, test_env, {"obs": obs_space, "act": act_space})
    algorithm: Any = make_algorithm(training.algorithm, obs_space, act_space, settings)
    if settings.get("random_shift"):
        algorithm.augment = learn.RandomShift(settings["random_shift"])
    arguments = trainer_arguments(training.algorithm, settings) | {"checkpoint_dir": folder}
    if test_env is not None:
        tested = _environment(test_env, settings, is_test=True)
        test = Collector(algorithm.policy, tested, num_envs=settings["num_envs"], seed=training.seed + 1)
        arguments["test_collector"] = stack.enter_context(test)
    if recipe.is_offline:
        arguments["buffer"] = rows
    else:
        arguments["training_collector"] = stack.enter_context(_make_collector(training, algorithm.policy, obs_space))
    if training.workers and getattr(recipe.algorithm, "allows_stale_steps", False):
        arguments["asynchronous"] = True
    updates = settings["max_epochs"] * settings["epoch_num_steps"]
    interval = max(1, updates // _POINTS)
    steps_an_update = 1 if recipe.is_offline else settings["collection_step_num_env_steps"] or 1
    log = TrainingLog(
        folder / _LOG, training_interval=interval, update_interval=max(1, updates // steps_an_update // _POINTS)
    )
    stack.callback(log.finalize)

    def save_policy(best: Any) -> None:
        write_torch(best.policy, folder / _POLICY)

    hook = "save_best_fn" if test_env is not None else "save_checkpoint_fn"
    arguments[hook] = save_policy if test_env is not None else lambda *_: save_policy(algorithm)
    trainer: learn.Trainer[Any] = algorithm.create_trainer(recipe.params(logger=log, **arguments))
    return trainer


def _environment(name: str, settings: Mapping[str, Any], *, is_test: bool = False) -> Any:
    """Return the id or function from which collectors create environments; Atari environments are preprocessed."""
    from samplebatch.env.atari import is_atari, make_atari

    if not is_atari(name):
        if (settings.get("stack_num") or 1) > 1:
            raise ArgumentError(
                f"stack_num must be omitted for {name!r}, because only frames of Atari are stacked, got "
                f"{settings['stack_num']}"
            )
        return name
    options = {} if is_test else {"terminal_on_life_loss": True, "clip_rewards": True}
    return partial(make_atari, name, stack_num=_frames(settings), **options)


def _frames(settings: Mapping[str, Any]) -> int:
    frames = settings.get("stack_num")
    return 4 if frames is None else whole("stack_num", frames, 1)


def choose_storage(source: str, space: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the buffer options for observations: image frames are stored once and compressed.

    Settings that are not None override these options.
    """
    from samplebatch.env.atari import is_atari

    if "stack_num" not in settings:
        return {}
    options: dict[str, Any] = {}
    if len(space.shape or ()) == 3 and space.dtype == np.uint8:
        options = {"ignore_obs_next": True, "compress": True}
        if is_atari(source) and _frames(settings) > 1:
            options |= {"stack_num": _frames(settings), "save_only_last_obs": True}
    names = ("ignore_obs_next", "save_only_last_obs", "compress")
    return options | {name: settings[name] for name in names if settings[name] is not None}


def _make_collector(training: Training, policy: Any, space: Any) -> Collector | RolloutWorkers:
    source = _environment(training.source, training.settings)
    options = choose_storage(training.source, space, training.settings)
    settings, envs = training.settings, training.settings["num_envs"]
    rings = envs * max(training.workers, 1)
    size = settings.get("buffer_size") or 2 * max(settings["collection_step_num_env_steps"] or 0, 50_000)
    alpha = settings.get("prioritized_alpha")
    buffer: Any
    if alpha:
        beta = settings["prioritized_beta"]
        buffer = PrioritizedVectorReplayBuffer(
            size, rings, alpha=alpha, beta=beta, random_seed=training.seed, **options
        )
    else:
        buffer = VectorReplayBuffer(size, rings, random_seed=training.seed, **options)
    # A buffer that stacks frames stacks infos, too.
    infos = options.get("stack_num", 1) == 1
    if not training.workers:
        return Collector(policy, source, buffer, num_envs=envs, seed=training.seed, exploration_noise=True, infos=infos)
    # Copies of the policy in workers must explore as in a training step.
    with learn.policy_within_training_step(policy):
        return RolloutWorkers(
            policy,
            source,
            buffer,
            infos=infos,
            num_workers=training.workers,
            envs_per_worker=envs,
            seed=training.seed,
            exploration_noise=True,
            max_lag=settings.get("max_lag"),
        )


def _fill(training: Training, trainer: Any) -> None:
    """Collect the initial random steps of off-policy training in this process, even if workers collect later steps."""
    steps = training.settings.get("start_steps")
    if not steps:
        return
    source = trainer.params.training_collector
    if not training.workers:
        source.collect(n_step=steps, random=True)
        return
    rings = training.workers * training.settings["num_envs"]
    policy = trainer.algorithm.policy
    env, infos = _environment(training.source, training.settings), source.buffer.stack_num == 1
    with Collector(policy, env, source.buffer, num_envs=rings, seed=training.seed + 2, infos=infos) as collector:
        collector.collect(n_step=steps, random=True)
        # Workers continue in the same rings with their own episodes, so unfinished episodes end here.
        collector.reset_env()


def check_environment(training: Training) -> None:
    """Create the environment and the algorithm once, so that unsuitable arguments are rejected before runs start."""
    if training.environment is not None:
        spaces = _spaces_of(training.environment, training.settings)
        make_algorithm(training.algorithm, *spaces, training.settings)


def _spaces_of(env: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    environment: Any = make_environment(_environment(env, settings, is_test=True))
    try:
        if not hasattr(environment, "observation_space") or callable(environment.observation_space):
            raise EnvironmentSpecError(
                f"environment {env!r} must have one agent for training, got a {type(environment).__name__}"
            )
        return environment.observation_space, environment.action_space
    finally:
        environment.close()


def _open_rows(source: str, *, allow_pickle: bool = False) -> Any:
    """Open training data: folders and Parquet files are read on demand, all other files are loaded into a buffer."""
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(2, "No such file or folder to learn from", source)
    if path.is_dir() or path.suffix == ".parquet":
        return open_source(path)
    loaded: Any = load(path, allow_pickle=allow_pickle)
    if isinstance(loaded, ReplayBuffer):
        return loaded
    buffer = ReplayBuffer(len(loaded))
    buffer.extend(loaded)
    return buffer


def infer_spaces(rows: Any) -> tuple[Any, Any]:
    """Infer the observation space and the action space from data; scalar integer actions have a Discrete space."""
    import gymnasium

    data, _ = rows.sample(0) if isinstance(rows, ReplayBuffer) else (rows.read(), None)
    batch: Batch = data if isinstance(data, Batch) else data.as_batch("tianshou")
    obs, act = np.asarray(batch.obs), np.asarray(batch.act)
    if act.dtype.kind in "iu" and act.ndim == 1:
        actions: Any = gymnasium.spaces.Discrete(int(act.max()) + 1)
    else:
        actions = gymnasium.spaces.Box(act.min(0), act.max(0), dtype=np.float32)
    return gymnasium.spaces.Box(-np.inf, np.inf, obs.shape[1:], np.float32), actions


def _check_shapes(rows: Any, env: str, spaces: Mapping[str, Any]) -> None:
    if not len(rows):
        return
    first = rows[rows.sample_indices(0)[:1]] if isinstance(rows, ReplayBuffer) else rows.take([0]).as_batch("tianshou")
    for name, space in spaces.items():
        column = first[name]
        if isinstance(column, np.ndarray) and column.shape[1:] != space.shape:
            raise ArgumentError(
                f"column {name!r} must have rows of shape {space.shape}, the shape in {env!r}, got {column.shape[1:]}"
            )


def show_run(folder: Path, plot: Path | None) -> None:
    """Print the learning curve of a run; plot all learning curves unless `plot` is None."""
    log = read_log(folder / _LOG)
    curves = learning_curves(log)
    for name in [name for name in ("test/returns_stat/mean", "update/loss") if name in curves][:1]:
        for line in draw_text(name, curves[name], width=min(60, console().width - 20)):
            say(line)
    if plot is not None:
        draw_curves(log, plot)
        say(f"Drew {plot}")
