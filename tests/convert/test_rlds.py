"""Episodes as RLDS lays them out: one step more than transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.convert import from_rlds, to_rlds
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnNotFoundError, ColumnTypeError
from tests.convert.experience import two_episodes


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("as_steps", [False, True], ids=["arrays", "steps"])
def test_episodes_are_restored(nested: bool, as_steps: bool) -> None:
    batch = two_episodes(nested=nested)
    batch["action_logp"] = np.arange(5.0)
    episodes: Any = list(to_rlds(batch))
    if as_steps:
        episodes = [
            {"steps": [_row(item["steps"], i) for i in range(len(item["steps"]["is_last"]))]} for item in episodes
        ]
    actual = from_rlds(episodes).drop("discount")
    assert set(actual.column_names) == set(batch.column_names)
    for path in batch.column_names:
        assert actual[path].tolist() == batch[path].tolist()


def _row(values: Any, i: int) -> Any:
    if isinstance(values, tuple):
        return tuple(_row(item, i) for item in values)
    return {name: _row(item, i) for name, item in values.items()} if isinstance(values, dict) else values[i]


def test_steps_have_the_flags_and_order_of_rlds() -> None:
    first, second = (episode["steps"] for episode in to_rlds(two_episodes()))
    assert first["is_first"].tolist() == [True, False, False, False]
    assert first["is_last"].tolist() == [False, False, False, True]
    assert first["is_terminal"].tolist() == [False, False, False, True]
    assert first["discount"].tolist() == [1, 1, 0, 0]
    assert first["reward"].tolist() == [0, 1, 2, 0]
    assert first["observation"][:, 0].tolist() == [0, 1, 2, 3]
    assert second["is_last"].tolist() == [False, False, True]
    assert not second["is_terminal"].any()


def test_one_episode_is_not_copied() -> None:
    first, _ = to_rlds(two_episodes())
    batch = from_rlds([first])
    assert np.shares_memory(batch["obs"], first["steps"]["observation"])
    assert np.shares_memory(batch["rewards"], first["steps"]["reward"])


def test_a_cut_episode_has_neither_flag() -> None:
    first, _ = to_rlds(two_episodes())
    cut = {name: values[:3] for name, values in first["steps"].items()}
    batch = from_rlds([{"steps": cut}])
    assert not batch["terminateds"].any()
    assert not batch["truncateds"].any()


def test_other_objects_than_episodes_are_rejected() -> None:
    first, _ = to_rlds(two_episodes())
    with pytest.raises(ColumnTypeError, match="must contain at least one RLDS episode"):
        from_rlds([])
    with pytest.raises(ColumnTypeError, match="episode 0 of RLDS must be a dict with 'steps', got a list"):
        from_rlds([[]])  # type: ignore[list-item]
    with pytest.raises(ColumnLengthError, match="episode 0 of RLDS must have steps, got none"):
        from_rlds([{"steps": []}])
    for name in ("observation", "action", "is_last", "is_terminal"):
        with pytest.raises(ColumnNotFoundError, match=f"episode 0 of RLDS must have '{name}'"):
            from_rlds([{"steps": {key: value for key, value in first["steps"].items() if key != name}}])
    with pytest.raises(ColumnLengthError, match="'rewards'"):
        from_rlds([{"steps": first["steps"] | {"reward": np.zeros(2)}}])
    with pytest.raises(ColumnNotFoundError, match="column 'new_obs' must exist"):
        next(to_rlds(two_episodes().drop("new_obs")))


def test_steps_that_differ_in_their_entries_or_shapes_are_rejected() -> None:
    step = {"observation": [1.0], "action": 0, "is_last": False, "is_terminal": False}
    without = {name: value for name, value in step.items() if name != "action"}
    with pytest.raises(ColumnMismatchError, match="column 'steps' must have the same structure in all rows"):
        from_rlds([{"steps": [step, without]}])
    with pytest.raises(ColumnTypeError, match=r"column 'steps\.observation' must have rows of equal shape"):
        from_rlds([{"steps": [step, step | {"observation": [1.0, 2.0]}]}])
