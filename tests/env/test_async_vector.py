"""Environments that are stepped one by one answer as those that are stepped together do."""

from __future__ import annotations

import multiprocessing
from typing import Any

import gyms
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from samplebatch import Collector
from samplebatch.env.async_vector import AsyncEnvironments

MODES = ["NextStep", "SameStep", "Disabled"]
CONTEXT = multiprocessing.get_context("fork")


def ladders(
    lengths: list[int], mode: str = "NextStep", kind: Any = gyms.Ladder, memory: bool = True, **given: Any
) -> Any:
    makers = [lambda n=n, length=length: kind(n, length, **given) for n, length in enumerate(lengths)]
    return AsyncVectorEnv(makers, autoreset_mode=mode, shared_memory=memory, context="fork")


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_an_episode_is_told_before_the_next_one_begins(mode: str, memory: bool) -> None:
    environments = AsyncEnvironments(ladders([2, 9], mode, memory=memory, says=True))
    environments.reset()
    act, first = [np.zeros(1, int)], np.array([0])
    environments.send(act, first)
    made = environments.wait()
    assert (made.envs.tolist(), made.ended.tolist(), made.ready.tolist()) == ([0], [], [0])
    environments.send(act, first)
    made = environments.wait()
    new_obs, rewards, terminateds, truncateds, infos = made.outcome
    assert new_obs[0].tolist() == [[0, 0, 2]]
    assert (rewards.tolist(), terminateds.tolist(), truncateds.tolist()) == ([2.0], [True], [False])
    assert infos == [{"step": 2, "name": "step 2"}]
    assert made.ended.tolist() == [0]
    if mode != "SameStep":
        assert (made.ready.tolist(), made.obs, made.infos) == ([], [], [])
        assert environments.under_way == 1
        made = environments.wait()
        assert (made.envs.tolist(), made.outcome[0], made.ended.tolist()) == ([], [], [])
    assert made.ready.tolist() == [0]
    assert made.obs[0].tolist() == [[0, 1, 0]]
    assert made.infos == [{"episode_number": 1}]
    assert environments.under_way == 0
    environments.close()


def test_only_those_are_waited_for_that_are_asked_about() -> None:
    gate = CONTEXT.RawValue("b", 0)
    makers = [lambda n=n: gyms.Watched(n, 9, gate=gate if n == 0 else None) for n in range(3)]
    environments = AsyncEnvironments(AsyncVectorEnv(makers, context="fork"))
    environments.reset()
    environments.send([np.zeros(3, int)], np.arange(3))
    among = np.array([True, False, True])
    assert environments.wait(1, None, among).envs.tolist() == [2]
    assert environments.wait(1, 0.01, np.array([False, True, False])).envs.tolist() == [1]
    # Whoever is not under way cannot be waited for.
    assert environments.wait(3, None, np.array([False, True, True])).envs.tolist() == []
    assert environments.under_way == 1
    gate.value = 1
    assert environments.wait(3).envs.tolist() == [0]
    environments.close()


@pytest.mark.parametrize("mode", MODES)
def test_stepped_together_they_are_what_a_collector_takes(mode: str) -> None:
    def stay(obs: Any) -> Any:
        return np.zeros(len(obs), int)

    found = []
    for env in (
        AsyncEnvironments(ladders([2, 3, 1], mode, says=True)),
        SyncVectorEnv(
            [lambda n=n: gyms.Ladder(n, [2, 3, 1][n], says=True) for n in range(3)], autoreset_mode="SameStep"
        ),
    ):
        with Collector(stay, env) as collector:
            batch = collector.collect(n_step=30).batch
            found.append({name: batch[name].tolist() for name in batch.column_names if name != "eps_id"})
    assert found[0] == found[1]


def test_arrays_stay_as_they_were_handed_out() -> None:
    environments = AsyncEnvironments(ladders([5, 5], kind=gyms.Reusing))
    begun, _ = environments.reset()
    environments.send([np.zeros(2, int)], np.arange(2))
    one = environments.wait(2)
    environments.send([np.zeros(2, int)], np.arange(2))
    environments.wait(2)
    environments.reset()
    assert begun[0].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert one.outcome[0][0].tolist() == one.obs[0].tolist() == [[0, 0, 1], [1, 0, 1]]
    environments.close()


def test_what_is_under_way_is_waited_for_before_a_reset() -> None:
    # Without shared memory, Gymnasium would reset an environment once more in the step after the reset.
    for mode in MODES:
        environments = AsyncEnvironments(ladders([1, 9], mode, memory=False))
        environments.reset()
        environments.send([np.zeros(2, int)], np.arange(2))
        obs, _ = environments.reset()
        assert obs[0][:, 2].tolist() == [0, 0]
        episode = obs[0][0, 1]
        environments.send([np.zeros(1, int)], np.array([0]))
        made = environments.wait()
        assert made.outcome[0][0].tolist() == [[0, episode, 1]]
        assert made.ended.tolist() == [0]
        environments.close()
