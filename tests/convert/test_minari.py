"""Minari's datasets, by Minari itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import ActionUnit, Collector, RandomPolicy, ReplayBuffer, SampleBatch
from samplebatch.convert import episodes_from_minari, from_minari, to_minari
from samplebatch.errors import ArgumentError, ColumnMismatchError, ColumnNotFoundError, ColumnTypeError
from tests.convert.experience import two_episodes

minari = pytest.importorskip("minari")
gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces

LINE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
NESTED = spaces.Dict(
    x=LINE,
    camera=spaces.Box(0, 255, (4, 1), np.uint8),
    pair=spaces.Tuple([spaces.Box(-np.inf, np.inf, (), np.float32)] * 2),
)
COLUMNS = ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "eps_id", "t")


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with warnings.catch_warnings():
        # Minari warns of everything that it is not told about a dataset.
        warnings.simplefilter("ignore", UserWarning)
        yield


def write(source: Any, name: str = "line/test-v0", **about: Any) -> Any:
    return to_minari(source, name, **{"observation_space": LINE, "action_space": spaces.Discrete(3), **about})


def test_a_batch_is_restored_exactly() -> None:
    write(two_episodes())
    assert from_minari(minari.load_dataset("line/test-v0")) == two_episodes().select(*COLUMNS)


def test_the_environment_that_a_dataset_names_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    write(two_episodes())
    (metadata,) = tmp_path.rglob("metadata.json")
    spec = gymnasium.envs.registration.EnvSpec("Evil-v0", entry_point="evil:make").to_json()
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"env_spec": spec}))
    dataset = minari.load_dataset("line/test-v0")
    assert dataset.env_spec.entry_point == "evil:make"
    assert from_minari(dataset) == two_episodes().select(*COLUMNS)


def test_nested_observations_are_restored() -> None:
    dataset = write(two_episodes(nested=True), observation_space=NESTED)
    actual = from_minari(dataset)
    for name in ("obs", "new_obs"):
        assert actual[name].keys() == NESTED.spaces.keys()
        assert actual[f"{name}.camera"].tolist() == two_episodes(nested=True)[f"{name}.camera"].tolist()
        assert actual[f"{name}.pair.1"].tolist() == two_episodes(nested=True)[f"{name}.pair.1"].tolist()


def test_minari_reads_the_episodes_with_their_final_observations() -> None:
    first, second = write(two_episodes()).iterate_episodes()
    assert first.observations[:, 0].tolist() == [0, 1, 2, 3]
    assert second.observations[:, 0].tolist() == [10, 11, 12]
    assert first.terminations.tolist() == [False, False, True]
    assert second.truncations.tolist() == [False, True]


def test_each_episode_shares_memory_between_observations() -> None:
    (second,) = episodes_from_minari(write(two_episodes()), episodes=[1])
    assert second["eps_id"].tolist() == [1, 1]
    assert np.shares_memory(second["obs"], second["new_obs"])


def test_infos_belong_to_their_steps() -> None:
    batch = two_episodes()
    batch["infos"] = [{"lives": i, "speed": i / 2} for i in range(5)]
    assert write(batch)[0].infos["lives"].tolist() == [0, 0, 1, 2]
    actual = from_minari(minari.load_dataset("line/test-v0"))
    assert actual["infos.lives"].tolist() == list(range(5))
    assert actual["infos"]["speed"].tolist() == [0, 0.5, 1, 1.5, 2]


def test_columns_that_minari_cannot_store_are_rejected_with_the_name() -> None:
    for infos, message in (
        (
            [{"a": 1}, {}, {}, {}, {}],
            "column 'infos' must have the same keys in all steps, got 'a' only in some; drop it",
        ),
        ([{"name": "x"}] * 5, "column 'infos.name' must be numeric to be stored by Minari"),
    ):
        batch = two_episodes()
        batch["infos"] = infos
        with pytest.raises(ColumnTypeError, match=message):
            write(batch)
    with pytest.raises(ColumnNotFoundError, match="column 'rewards' must exist to be converted"):
        write(two_episodes().drop("rewards"))
    with pytest.raises(ArgumentError, match="env, or observation_space and action_space, must be passed"):
        to_minari(two_episodes(), "line/test-v0", observation_space=LINE)
    assert not minari.list_local_datasets()


def test_an_unfinished_episode_is_written_as_truncated() -> None:
    assert write(two_episodes()[:2])[0].truncations.tolist() == [False, True]


def test_a_collector_and_its_buffer_are_written() -> None:
    buffer = ReplayBuffer(500)
    env = gymnasium.make("CartPole-v1")
    with Collector(RandomPolicy(env.action_space), env, buffer=buffer, seed=3) as collector:
        report = collector.collect(n_episode=4)
    dataset = to_minari(buffer, "pole/random-v0", env="CartPole-v1")
    assert dataset.total_episodes == 4
    assert dataset.total_steps == len(buffer) == report.n_collected_steps
    actual = from_minari(dataset)
    assert np.array_equal(actual["obs"], buffer[:].obs)
    assert np.array_equal(actual["new_obs"], buffer[:].obs_next)
    assert isinstance(actual, SampleBatch)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("in_buffer", [False, True])
def test_actions_are_written_in_the_unit_of_the_environment(random: bool, in_buffer: bool) -> None:
    def steer(obs: Any) -> Any:
        return np.tanh(obs[:, :1]).astype(np.float32)

    buffer = ReplayBuffer(100) if in_buffer else None
    with Collector(steer, "Pendulum-v1", buffer, map_action="scale", seed=1, infos=False) as collector:
        recorded = collector.collect(n_step=50, random=random).batch
    dataset = to_minari(recorded if buffer is None else buffer, "pendulum/test-v0", env="Pendulum-v1")
    actual = from_minari(dataset)
    assert actual.action_unit == ActionUnit()
    assert np.abs(actual["actions"]).max() > 1.0
    assert check_pendulum(actual["obs"], actual["actions"], actual["new_obs"]) == len(actual) == 50


def check_pendulum(obs: Any, act: Any, new_obs: Any) -> int:
    """Count the rows whose action leads from the observation to the next observation."""
    pendulum: Any = gymnasium.make("Pendulum-v1").unwrapped
    pendulum.reset(seed=0)
    actual = 0
    for before, action, after in zip(obs, act, new_obs, strict=True):
        pendulum.state = np.array([np.arctan2(before[1], before[0]), before[2]], np.float64)
        actual += np.allclose(pendulum.step(action)[0], after, atol=2e-5)
    return actual


def test_actions_mapped_by_a_function_are_rejected() -> None:
    batch = two_episodes()
    batch.action_unit = ActionUnit("function")
    with pytest.raises(ColumnMismatchError, match="must be converted by that function"):
        write(batch)
