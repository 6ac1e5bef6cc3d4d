"""Environments that are stepped one by one answer as those that are stepped together do."""

from __future__ import annotations

import ast
import multiprocessing
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import gyms
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from samplebatch import Collector
from samplebatch import env as package
from samplebatch.env.async_vector import AsyncEnvironments
from samplebatch.errors import WorkerError

CONTEXT = multiprocessing.get_context("fork")
Async = partial(AsyncEnvironments, start_method="fork")


def ladders(lengths: list[int], kind: Any = gyms.Ladder, **options: Any) -> list[Any]:
    return [partial(kind, n, length, **options) for n, length in enumerate(lengths)]


class Reluctant(gyms.Watched):
    """Ladder whose reset after an episode waits until its gate is open."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        while self._episode >= 0 and not self._gate.value:
            time.sleep(0.001)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return gyms.Ladder.step(self, action)


def test_the_end_of_an_episode_is_reported_before_the_next_one_starts() -> None:
    gate = CONTEXT.RawValue("b", 0)
    environments = Async(ladders([2, 9], Reluctant, gate=gate, with_infos=True))
    environments.reset()
    act, first = [np.zeros(1, int)], np.array([0])
    environments.send(first, act)
    result = environments.recv()
    assert (result.envs.tolist(), result.ended.tolist(), result.ready.tolist()) == ([0], [], [0])
    environments.send(first, act)
    result = environments.recv()
    assert {name: column.tolist() for name, column in result.columns.items()} == {
        "new_obs": [[0, 0, 2]],
        "rewards": [2.0],
        "terminateds": [True],
        "truncateds": [False],
    }
    assert result.step_infos == [{"step": 2, "name": "step 2"}]
    assert result.ended.tolist() == [0]
    assert (result.ready.tolist(), result.obs, result.infos) == ([], [], [])
    assert environments.under_way == 1
    gate.value = 1
    result = environments.recv()
    assert (result.envs.tolist(), result.columns, result.ended.tolist()) == ([], {}, [])
    assert result.ready.tolist() == [0]
    assert result.obs[0].tolist() == [[0, 1, 0]]
    assert result.infos == [{"episode_number": 1}]
    assert environments.under_way == 0
    environments.close()


def test_recv_waits_only_for_the_requested_environments() -> None:
    gate = CONTEXT.RawValue("b", 0)
    makers = [lambda n=n: gyms.Watched(n, 9, gate=gate if n == 0 else None) for n in range(3)]
    environments = Async(makers)
    environments.reset()
    environments.send(np.arange(3), [np.zeros(3, int)])
    among = np.array([True, False, True])
    assert environments.recv(1, None, among).envs.tolist() == [2]
    assert environments.recv(1, 0.01, np.array([False, True, False])).envs.tolist() == [1]
    # Whoever is not under way cannot be waited for.
    assert environments.recv(3, None, np.array([False, True, True])).envs.tolist() == []
    assert environments.under_way == 1
    gate.value = 1
    assert environments.recv(3).envs.tolist() == [0]
    environments.close()


def test_a_collector_accepts_async_environments_stepped_together() -> None:
    def stay(obs: Any) -> Any:
        return np.zeros(len(obs), int)

    actual = []
    for env in (
        Async(ladders([2, 3, 1], with_infos=True)),
        SyncVectorEnv(
            [lambda n=n: gyms.Ladder(n, [2, 3, 1][n], with_infos=True) for n in range(3)], autoreset_mode="SameStep"
        ),
    ):
        with Collector(stay, env) as collector:
            batch = collector.collect(n_step=30).batch
            actual.append({name: batch[name].tolist() for name in batch.column_names if name != "eps_id"})
    assert actual[0] == actual[1]


def test_returned_arrays_are_not_overwritten() -> None:
    environments = Async(ladders([5, 5], kind=gyms.Reusing))
    result, _ = environments.reset()
    environments.send(np.arange(2), [np.zeros(2, int)])
    first = environments.recv(2)
    environments.send(np.arange(2), [np.zeros(2, int)])
    environments.recv(2)
    environments.reset()
    assert result[0].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert first.columns["new_obs"].tolist() == first.obs[0].tolist() == [[0, 0, 1], [1, 0, 1]]
    environments.close()


def test_steps_that_are_in_progress_are_waited_for_before_a_reset() -> None:
    environments = Async(ladders([1, 9]))
    environments.reset()
    environments.send(np.arange(2), [np.zeros(2, int)])
    obs, _ = environments.reset()
    assert obs[0][:, 2].tolist() == [0, 0]
    episode = obs[0][0, 1]
    environments.send(np.array([0]), [np.zeros(1, int)])
    result = environments.recv()
    assert result.columns["new_obs"].tolist() == [[0, episode, 1]]
    assert result.ended.tolist() == [0]
    environments.close()


def test_the_first_of_several_failed_resets_is_reported_once() -> None:
    class Stubborn(gyms.Ladder):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if options:
                raise ValueError("no options")
            return super().reset(seed=seed)

    environments = Async(ladders([9, 9, 9], Stubborn))
    environments.reset()
    with pytest.raises(WorkerError, match=r"environment 0 .* raised ValueError: no options"):
        environments.reset(options={"level": 1})
    obs, _ = environments.reset()
    assert obs[0][:, 2].tolist() == [0, 0, 0]
    environments.close()


# Gymnasium


FOLDER = Path(package.__file__).parent


def private_names(source: str) -> set[str]:
    """List private attributes that a module reads from objects other than `self`, `cls` and a base class."""
    actual = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            actual.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            actual.add(ast.unparse(node.args[1]).strip("'"))
    # Named tuples have a public method of that name.
    return {name for name in actual if name.startswith("_") and not name.endswith("__")} - {"_replace"}


def test_no_private_name_of_gymnasium_is_used() -> None:
    assert private_names("env._state = getattr(inner, '_env_obs')\nself._own = env.reset()") == {"_state", "_env_obs"}
    sources = FOLDER.glob("*.py")
    # Tianshou's vectors have no public name for the functions that make their environments.
    private = {path.name: names for path in sources if (names := private_names(path.read_text()))}
    assert private == {"gymnasium.py": {"_env_fns"}}


def test_environment_processes_do_not_use_gymnasium_vector_classes() -> None:
    source = (FOLDER / "async_vector.py").read_text()
    assert not re.search(r"gymnasium\.vector|parent_pipes|error_queue|AsyncVectorEnv", source)
