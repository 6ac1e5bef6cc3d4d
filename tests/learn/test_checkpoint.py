"""Checkpoints: a killed training resumes exactly, and nothing is unpickled without permission."""

from __future__ import annotations

import contextlib
import errno
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting import Counting
from resumed_run import Cloning, run

from samplebatch import (
    Batch,
    Collector,
    Dataset,
    MixedSampler,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)
from samplebatch.errors import ArgumentError, ColumnTypeError, FormatError, UntrustedPickleError
from samplebatch.learn import (
    PPO,
    SAC,
    AdamOptimizerFactory,
    AutoAlpha,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    DiscreteActor,
    DiscreteActorPolicy,
    LRSchedulerFactoryLinear,
    Net,
    OfflineTrainer,
    OfflineTrainerParams,
    OffPolicyTrainer,
    OffPolicyTrainerParams,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
    OUNoise,
    RecurrentBody,
    SACPolicy,
    ValueCritic,
    load_checkpoint,
    read_log,
    save_checkpoint,
)
from samplebatch.learn.checkpoint import FILE, read_checkpoint

needs_safe_torch = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="older releases of torch need permission"
)


def figures(folder: Path) -> list[tuple[str, int, float]]:
    """Read all metrics of a training log except times."""
    log = read_log(folder / "log")
    rows = zip(log["name"].tolist(), log["step"].tolist(), log["value"].tolist(), strict=True)
    return [row for row in rows if not any(word in row[0] for word in ("time", "speed"))]


def parameters(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = torch.load(folder / "final.pt", weights_only=True)
    return actual


def assert_same(first: Any, other: Any) -> None:
    if isinstance(first, dict):
        assert first.keys() == other.keys()
        for name, value in first.items():
            assert_same(value, other[name])
    elif isinstance(first, list | tuple):
        for value, its in zip(first, other, strict=True):
            assert_same(value, its)
    elif isinstance(first, torch.Tensor):
        assert first.dtype == other.dtype
        assert torch.equal(first, other)
    else:
        assert first == other


@pytest.fixture(scope="module", params=["dqn", "on policy", "offline"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Kind and metrics of a training that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(request.param, folder) == 0
    return request.param, folder


@pytest.mark.parametrize("kill", ["in an epoch", "while saving"])
def test_a_killed_training_resumes_with_the_same_figures(
    uninterrupted: tuple[str, Path], kill: str, tmp_path: Path
) -> None:
    kind, full = uninterrupted
    # Offline, a test is the only hook, and gradient steps of 16 rows are counted.
    died = run(kind, tmp_path, die_at=960 if kind == "offline" else 300) if kill == "in an epoch" else None
    assert died or run(kind, tmp_path, die_saving=3) == -signal.SIGKILL
    assert died in (None, -signal.SIGKILL)
    assert run(kind, tmp_path) == 0
    assert (tmp_path / "resumed.txt").read_text() == "in epoch 2, reset: None"
    assert figures(tmp_path) == figures(full)
    assert_same(parameters(tmp_path), parameters(full))


def test_unsaveable_environments_are_reset_and_the_reason_reported(tmp_path: Path) -> None:
    assert run("unpicklable", tmp_path, die_at=300) == -signal.SIGKILL
    assert run("unpicklable", tmp_path) == 0
    output = (tmp_path / "resumed.txt").read_text()
    assert output == "in epoch 2, reset: TypeError: cannot pickle 'generator' object"


def trainer(folder: Path | None = None, **options: Any) -> OffPolicyTrainer:
    algorithm = Counting()
    collector = Collector(algorithm.policy, "CartPole-v1", VectorReplayBuffer(100, 2), num_envs=2, seed=1)
    params = OffPolicyTrainerParams(
        training_collector=collector,
        checkpoint_dir=folder,
        max_epochs=2,
        epoch_num_steps=20,
        collection_step_num_env_steps=10,
        verbose=False,
        show_progress=False,
        **options,
    )
    return OffPolicyTrainer(algorithm, params)


def test_environments_are_unpickled_only_if_that_is_allowed(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    fresh = trainer()
    with pytest.raises(UntrustedPickleError, match="pass allow_pickle=True if you trust"):
        load_checkpoint(fresh, tmp_path)
    assert fresh.counters.epoch == 0
    assert load_checkpoint(fresh, tmp_path, allow_pickle=True) is None
    assert (fresh.counters.epoch, fresh.is_done) == (2, True)


class Loud:
    """Object that leaves a trace when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


class Holding:
    """Object with a state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": "Holding", "parts": {"value": self.value}, "why_reset": None}

    def load_state_dict(self, state: Any, *, allow_pickle: bool = False) -> None:
        self.value = state["parts"]["value"]


def test_objects_are_not_unpickled_without_permission(tmp_path: Path) -> None:
    save_checkpoint(Holding(Loud()), tmp_path)
    with pytest.raises(UntrustedPickleError):
        load_checkpoint(Holding(), tmp_path)
    with pytest.raises(SystemExit, match="unpickled"):
        load_checkpoint(Holding(), tmp_path, allow_pickle=True)


def test_a_file_of_another_writer_is_not_unpickled(tmp_path: Path) -> None:
    torch.save(Loud(), tmp_path / FILE)
    with pytest.raises(FormatError, match=r"must be a checkpoint of a trainer, got an unreadable file"):
        load_checkpoint(Holding(), tmp_path, allow_pickle=True)


@needs_safe_torch
@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::-1],
        np.zeros((0, 3), np.float16),
        np.array(["a", "bc"]),
        np.array(2.5),
        np.datetime64("2026-01-01", "s"),
        np.float32(0.1),
        np.bool_(True),
        2**100,
        b"bytes",
        (1, [None, {"a": 1.5, 3: "x"}]),
    ],
    ids=repr,
)
def test_plain_values_are_restored_without_permission(value: Any, tmp_path: Path) -> None:
    save_checkpoint(Holding(value), tmp_path)
    loaded = Holding()
    load_checkpoint(loaded, tmp_path)
    assert type(loaded.value) is type(value)
    if isinstance(value, np.ndarray):
        assert loaded.value.dtype == value.dtype
        np.testing.assert_array_equal(loaded.value, value)
        assert loaded.value.flags.writeable
    else:
        assert loaded.value == value


@needs_safe_torch
def test_seeds_are_restored_with_their_children(tmp_path: Path) -> None:
    seeds = np.random.SeedSequence(7, spawn_key=(3,))
    seeds.spawn(2)
    save_checkpoint(Holding(seeds), tmp_path)
    loaded = Holding()
    load_checkpoint(loaded, tmp_path)
    assert loaded.value.spawn(1)[0].generate_state(4).tolist() == seeds.spawn(1)[0].generate_state(4).tolist()


def test_unpicklable_values_are_rejected_and_the_checkpoint_is_kept(tmp_path: Path) -> None:
    save_checkpoint(Holding(1), tmp_path)
    with pytest.raises(ColumnTypeError, match="values in a checkpoint must be picklable, got a generator"):
        save_checkpoint(Holding(number for number in range(3)), tmp_path)
    assert read_checkpoint(tmp_path, allow_pickle=True)["parts"] == {"value": 1}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@contextlib.contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Limit the size of files, which simulates a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("elements", [100_000, 30_000])
def test_a_full_disk_raises_an_error_and_the_checkpoint_is_kept(elements: int, tmp_path: Path) -> None:
    save_checkpoint(Holding(1), tmp_path)
    # The second is as large as what a file buffers: it fails at the end.
    with full_disk(100_000), pytest.raises(OSError, match="File too large") as caught:
        save_checkpoint(Holding(torch.zeros(elements)), tmp_path)
    assert caught.value.filename == str(tmp_path / FILE)
    assert caught.value.errno == errno.EFBIG
    assert read_checkpoint(tmp_path, allow_pickle=True)["parts"] == {"value": 1}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_folder_without_a_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No checkpoint"):
        load_checkpoint(Holding(), tmp_path)


@pytest.mark.parametrize("state", [[1], {"trainer": "x"}, {"samplebatch.kind": "array"}], ids=repr)
def test_a_file_with_another_state_is_rejected(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / FILE)
    with pytest.raises(FormatError, match="must be a checkpoint of a trainer"):
        load_checkpoint(Holding(), tmp_path, allow_pickle=True)


def test_a_checkpoint_of_another_kind_of_trainer_is_rejected(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    algorithm = Counting()
    collector = Collector(algorithm.policy, "CartPole-v1", VectorReplayBuffer(100, 2), num_envs=2)
    other = OnPolicyTrainer(algorithm, OnPolicyTrainerParams(training_collector=collector))
    with pytest.raises(ArgumentError, match="state must be from a OnPolicyTrainer, got one from a OffPolicyTrainer"):
        load_checkpoint(other, tmp_path, allow_pickle=True)


def test_a_training_stopped_within_an_epoch_resumes_in_that_epoch(tmp_path: Path) -> None:
    def stop(_: int, steps: int) -> None:
        if steps == 20:
            stopped.request_stop()

    stopped = trainer(tmp_path, training_fn=stop)
    assert stopped.run().train_step == 30
    resumed = trainer()
    load_checkpoint(resumed, tmp_path, allow_pickle=True)
    assert (resumed.counters.epoch, resumed.counters.epoch_steps) == (2, 10)
    assert (resumed.run().train_step, resumed.is_done) == (40, True)


def test_checkpoints_are_preserved_at_their_interval_and_at_the_end(tmp_path: Path) -> None:
    recorded: list[int] = []

    def look(epoch: int, *_: int) -> None:
        recorded.append(read_checkpoint(tmp_path, allow_pickle=True)["parts"]["counters"]["epoch"] if epoch > 2 else 0)

    resumed = trainer(tmp_path, checkpoint_interval=2, save_checkpoint_fn=look)
    resumed.params.max_epochs = 5
    resumed.run()
    assert recorded == [0, 0, 2, 2, 4]
    assert read_checkpoint(tmp_path, allow_pickle=True)["parts"]["counters"]["epoch"] == 5


def recurrent_ppo() -> tuple[PPO, str]:
    env = gymnasium.make("CartPole-v1")
    body = RecurrentBody(env.observation_space, 8)
    schedule = LRSchedulerFactoryLinear(2, 40, 20)
    algorithm = PPO(
        policy=DiscreteActorPolicy(
            actor=DiscreteActor.for_space(body, env.action_space), action_space=env.action_space
        ),
        critic=ValueCritic(body),
        optim=AdamOptimizerFactory().with_lr_scheduler_factory(schedule),
        return_scaling=True,
    )
    return algorithm, "CartPole-v1"


def noisy_sac() -> tuple[SAC, str]:
    env = gymnasium.make("Pendulum-v1")
    obs, act = env.observation_space, env.action_space
    optim = AdamOptimizerFactory()
    actor = ContinuousActorProbabilistic.for_space(Net.for_space(obs, [8]), act, conditioned_sigma=True)
    algorithm = SAC(
        policy=SACPolicy(actor=actor, action_space=act, exploration_noise=OUNoise()),
        policy_optim=optim,
        critic=ContinuousCritic.for_space(obs, act, [8]),
        critic2=ContinuousCritic.for_space(obs, act, [8]),
        critic_optim=optim,
        alpha=AutoAlpha(-1.0, 0.0, optim),
    )
    return algorithm, "Pendulum-v1"


@pytest.mark.parametrize("make", [recurrent_ppo, noisy_sac])
def test_algorithms_of_the_library_resume_bit_for_bit(make: Any, tmp_path: Path) -> None:
    def library_trainer(**options: Any) -> Any:
        torch.manual_seed(0)
        algorithm, env = make()
        kind = OnPolicyTrainerParams if isinstance(algorithm, PPO) else OffPolicyTrainerParams
        buffer = VectorReplayBuffer(100, 2, random_seed=2)
        collector = Collector(algorithm.policy, env, buffer, num_envs=2, seed=1, exploration_noise=True)
        params = {"epoch_num_steps": 40, "collection_step_num_env_steps": 20, "batch_size": 10, "max_epochs": 2}
        return algorithm.create_trainer(kind(training_collector=collector, verbose=False, **params | options))

    uninterrupted = library_trainer()
    uninterrupted.run()
    library_trainer(max_epochs=1, checkpoint_dir=tmp_path).run()
    resumed = library_trainer()
    assert load_checkpoint(resumed, tmp_path, allow_pickle=True) is None
    assert resumed.run().train_step == 80
    assert_same(resumed.algorithm.state_dict(), uninterrupted.algorithm.state_dict())


def dataset(folder: Path) -> Dataset:
    actual = Dataset(folder, seed=3)
    if not actual.parts():
        with Collector("random", "CartPole-v1", seed=3) as collector:
            actual.extend(collector.collect(n_step=50).batch)
    return actual


def mixed(folder: Path) -> MixedSampler:
    newer = PrioritizedReplayBuffer(50, alpha=0.6, beta=0.4, random_seed=4)
    with Collector("random", "CartPole-v1", newer, seed=5) as collector:
        collector.collect(n_step=50)
    sources = {"older": dataset(folder), "newer": newer}
    return MixedSampler(sources, {"older": 1.0, "newer": 2.0}, missing="drop", seed=6)


@needs_safe_torch
@pytest.mark.parametrize("source", [dataset, mixed])
def test_an_offline_training_resumes_with_the_same_draws(source: Any, tmp_path: Path) -> None:
    def offline_trainer(**options: Any) -> OfflineTrainer:
        torch.manual_seed(0)
        params = {"epoch_num_steps": 5, "batch_size": 7, "max_epochs": 2, "verbose": False} | options
        return OfflineTrainer(Cloning(), OfflineTrainerParams(buffer=source(tmp_path / "rows"), **params))

    uninterrupted = offline_trainer()
    uninterrupted.run()
    offline_trainer(max_epochs=1, checkpoint_dir=tmp_path).run()
    resumed = offline_trainer()
    load_checkpoint(resumed, tmp_path)
    assert resumed.run().update_step == 10
    assert_same(resumed.algorithm.state_dict(), uninterrupted.algorithm.state_dict())


def test_rows_without_a_state_are_rejected_before_training(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"buffer must have state_dict and load_state_dict .*, got a list"):
        OfflineTrainer(Counting(), OfflineTrainerParams(buffer=[], checkpoint_dir=tmp_path))


def test_offline_checkpoints_omit_the_rows_of_the_source(tmp_path: Path) -> None:
    rows = ReplayBuffer(10)
    rows.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, obs_next=1, info={}))
    params = OfflineTrainerParams(buffer=rows, verbose=False, show_progress=False)
    save_checkpoint(OfflineTrainer(Counting(), params), tmp_path)
    assert set(read_checkpoint(tmp_path, allow_pickle=True)["parts"]["buffer"]) == {
        "bit_generator",
        "state",
        "has_uint32",
        "uinteger",
    }
