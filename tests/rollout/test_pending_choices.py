"""Choices come back as they were made, in whatever company their environments answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import Batch
from samplebatch.errors import ColumnLengthError
from samplebatch.policy.choices import Choice
from samplebatch.rollout.pending_choices import PendingChoices

NUM_ENVS = 5


def rows_of(pending: PendingChoices, envs: list[int]) -> dict[int, dict[str, Any]]:
    """Take choices, and return the row and the dtypes of each environment."""
    found: dict[int, dict[str, Any]] = {}
    for choice, places in pending.take(np.array(envs)):
        assert set(map(len, choice.columns.values())) == {len(places)}
        for row, place in enumerate(places.tolist()):
            assert envs[place] not in found
            found[envs[place]] = {name: (column[row], column.dtype) for name, column in choice.columns.items()}
    return found


@given(data=st.data(), whole=st.booleans())
def test_choices_come_back_once_and_unchanged(data: st.DataObject, whole: bool) -> None:
    pending = PendingChoices(NUM_ENVS, whole=whole)
    waiting: dict[int, dict[str, Any]] = {}
    for number in range(data.draw(st.integers(1, 12))):
        idle = [env for env in range(NUM_ENVS) if env not in waiting]
        if idle:
            envs = data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True))
            dtype = np.dtype(data.draw(st.sampled_from(["u1", "f8", "O"])))
            act = np.array([number * 10 + env for env in envs]).astype(dtype)
            columns = {"actions": act, **data.draw(st.sampled_from([{}, {"vf_preds": act.astype("f4")}]))}
            pending.put(Choice(dict(columns), [act], None, {"act": act}), np.array(envs))
            for row, env in enumerate(envs):
                waiting[env] = {name: (column[row], column.dtype) for name, column in columns.items()}
        answered = data.draw(st.lists(st.sampled_from(sorted(waiting)), min_size=1, unique=True))
        assert rows_of(pending, answered) == {env: waiting.pop(env) for env in answered}
        assert rows_of(pending, answered) == {}


def test_choices_of_the_same_columns_come_back_together() -> None:
    pending = PendingChoices(3)
    for env in (2, 0, 1):
        pending.put(Choice({"actions": np.array([env])}, [], None, {}), np.array([env]))
    (choice, places), *others = pending.take(np.arange(3))
    assert others == []
    assert choice.columns["actions"].tolist() == places.tolist() == [0, 1, 2]
    choice.columns["actions"][:] = 9
    pending.put(Choice({"actions": np.array([7])}, [], None, {}), np.array([1]))
    assert rows_of(pending, [1])[1]["actions"][0] == 7


def test_whole_choices_come_back_with_all_that_was_said() -> None:
    pending = PendingChoices(4, whole=True)
    for first, envs in ((0, [3, 1]), (5, [0])):
        act = np.arange(first, first + len(envs))
        decision = {
            "act": act,
            "policy": {"deep": {"value": act * 2}},
            "dist": torch.distributions.Normal(torch.tensor(act * 1.0), torch.ones(len(act))),
            "state": (act * 3, {"c": torch.tensor(act)}),
        }
        pending.put(Choice({"actions": act}, [act * 4], None, decision), np.array(envs))
    found = [(choice, places.tolist()) for choice, places in pending.take(np.array([0, 1, 2]))]
    assert [places for _, places in found] == [[1], [0]]
    for (choice, _), act in zip(found, (1, 5), strict=True):
        assert choice.actions[0].tolist() == [act * 4]
        assert choice.decision["act"].tolist() == [act]
        assert isinstance(choice.decision["policy"], Batch)
        assert choice.decision["policy"].deep.value.tolist() == [act * 2]
        assert choice.decision["dist"].loc.tolist() == [act]
        state, deep = choice.decision["state"]
        assert (state.tolist(), deep["c"].tolist()) == ([act * 3], [act])


def test_every_column_must_have_a_row_for_each_environment() -> None:
    pending = PendingChoices(4)
    for column, words in ((np.zeros(3), "got 3"), (np.zeros(1), "got 1"), (np.array(1.0), "got a single value")):
        with pytest.raises(ColumnLengthError, match=f"'policy.a' must have 2 rows, one for each environment, {words}"):
            pending.put(Choice({"policy.a": column}, [], None, {}), np.arange(2))


def test_what_is_forgotten_does_not_come_back() -> None:
    pending = PendingChoices(2)
    pending.put(Choice({"actions": np.arange(2)}, [], None, {}), np.arange(2))
    pending.clear()
    assert rows_of(pending, [0, 1]) == {}
