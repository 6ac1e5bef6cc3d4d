"""Model inputs at a step: columns, shifted columns and windows of steps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch, ViewRequirement
from samplebatch.errors import ArgumentError, ColumnNotFoundError, ColumnTypeError, FormatError, RowIndexError
from tests.batch.every_kind import in_sequences, with_every_kind
from tests.optional import torch


@pytest.fixture
def batch() -> SampleBatch:
    """Return 4 steps: at step t, the observation is t + 1, the action 10 t, the reward 100 t."""
    steps = np.arange(4)
    return SampleBatch(
        obs=steps + 1, new_obs=steps + 2, actions=steps * 10, rewards=steps * 100.0, state_out_0=steps[:, None] + 0.5
    )


def seen(batch: SampleBatch, requirement: ViewRequirement, index: Any, name: str = "view") -> list[Any]:
    inputs = batch.get_single_step_input_dict({name: requirement}, index)
    assert inputs["seq_lens"].tolist() == [1]
    assert inputs["seq_lens"].dtype == np.int32
    assert len(inputs) == 1
    return inputs[name].tolist()


@pytest.mark.parametrize(
    ("index", "expected"), [("last", [5]), (-1, [4]), (3, [4]), (0, [1]), (-4, [1]), (np.int64(2), [3])]
)
def test_the_observation_at_a_step(batch: SampleBatch, index: Any, expected: list[int]) -> None:
    assert seen(batch, ViewRequirement("obs"), index) == expected
    assert seen(batch, ViewRequirement(), index, name="obs") == expected


def test_views_of_columns_before_the_last_step(batch: SampleBatch) -> None:
    views = {
        "prev_actions": ViewRequirement("actions", shift=-1),
        "prev_rewards": ViewRequirement("rewards", shift=-1),
        "state_in_0": ViewRequirement("state_out_0", shift=-1),
    }
    inputs = batch.get_single_step_input_dict(views)
    assert {name: inputs[name].tolist() for name in views} == {
        "prev_actions": [30],
        "prev_rewards": [300],
        "state_in_0": [[3.5]],
    }
    inside = batch.get_single_step_input_dict(views, 2)
    assert {name: inside[name].tolist() for name in views} == {
        "prev_actions": [10],
        "prev_rewards": [100],
        "state_in_0": [[1.5]],
    }


def test_previous_columns_after_the_last_step_are_the_current_ones(batch: SampleBatch) -> None:
    views = {"prev_actions": ViewRequirement(), "prev_rewards": ViewRequirement()}
    inputs = batch.get_single_step_input_dict(views)
    assert inputs["prev_actions"].tolist() == [30]
    assert inputs["prev_rewards"].tolist() == [300]


def test_steps_before_the_first_are_zeros(batch: SampleBatch) -> None:
    assert seen(batch, ViewRequirement("actions", shift=-1), 0) == [0]
    assert seen(batch, ViewRequirement("obs", shift=-3), 1) == [0]
    assert seen(batch, ViewRequirement("obs", shift="-2:0"), 1) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("shift", "index", "expected"),
    [
        ("-2:0", "last", [[3, 4, 5]]),
        ("-2:0", 3, [[2, 3, 4]]),
        ("-3:-1", "last", [[2, 3, 4]]),
        ("-3:0:3", "last", [[2, 5]]),
        ("-2:1", 1, [[0, 1, 2, 3]]),
        ([-1, 0], "last", [[4, 5]]),
        ([0, -2, -1], 3, [[4, 2, 3]]),
        ([0], 2, [[3]]),
        ("0:0", 2, [[3]]),
        (1, 2, [4]),
        (0, 2, [3]),
        (-2, "last", [3]),
        ([-5, 0], 3, [[0, 4]]),
    ],
    ids=str,
)
def test_windows_of_steps(batch: SampleBatch, shift: Any, index: Any, expected: list[Any]) -> None:
    assert seen(batch, ViewRequirement("obs", shift=shift), index) == expected


def test_windows_longer_than_the_batch_are_padded(batch: SampleBatch) -> None:
    assert seen(batch, ViewRequirement("obs", shift="-6:0"), "last") == [[0, 0, 0, 2, 3, 4, 5]]
    assert seen(batch[:1], ViewRequirement("obs", shift="-2:0"), "last") == [[0, 0, 2]]


def test_windows_have_a_separate_axis() -> None:
    batch = SampleBatch(obs=np.arange(24).reshape(4, 2, 3))
    inputs = batch.get_single_step_input_dict(
        {"one": ViewRequirement("obs"), "stack": ViewRequirement("obs", shift="-1:0")}, index=2
    )
    assert inputs["one"].shape == (1, 2, 3)
    assert inputs["stack"].shape == (1, 2, 2, 3)
    assert inputs["stack"][0].tolist() == batch["obs"][1:3].tolist()


def test_steps_after_the_last_are_rejected(batch: SampleBatch) -> None:
    with pytest.raises(RowIndexError, match="view 'view' looks at step 4 of column 'obs', which has 4"):
        seen(batch, ViewRequirement("obs", shift=1), 3)
    for index in (4, -5):
        with pytest.raises(RowIndexError, match=f"step {index} is outside the batch, which has 4"):
            seen(batch, ViewRequirement("obs"), index)
    with pytest.raises(RowIndexError):
        SampleBatch(obs=np.empty(0), new_obs=np.empty(0)).get_single_step_input_dict({"obs": ViewRequirement()})


def test_views_not_used_for_actions_are_omitted(batch: SampleBatch) -> None:
    views = {"obs": ViewRequirement(), "advantages": ViewRequirement(used_for_compute_actions=False)}
    assert list(batch.get_single_step_input_dict(views)) == ["obs", "seq_lens"]
    assert list(batch.get_single_step_input_dict({})) == ["seq_lens"]


def test_the_error_lists_missing_columns(batch: SampleBatch) -> None:
    with pytest.raises(ColumnNotFoundError, match="no column 'action'; did you mean 'actions'"):
        seen(batch, ViewRequirement("action"), 0)
    with pytest.raises(ColumnNotFoundError, match="no column 'new_obs'"):
        seen(SampleBatch(obs=[1]), ViewRequirement("obs"), "last")


def test_a_view_on_a_leaf(batch: SampleBatch) -> None:
    nested = SampleBatch(obs={"x": np.arange(3), "y": np.arange(3) * 2})
    assert seen(nested, ViewRequirement("obs.y"), 2) == [4]


def test_every_kind_of_column_can_be_viewed() -> None:
    pytest.importorskip("torch")
    batch = with_every_kind(5)
    expected = {name: ViewRequirement() for name in batch if not name.startswith("ragged")}
    inputs = batch.get_single_step_input_dict(expected, index=3)
    assert {name: inputs.column(path).kind for name in ("flat f4", "torch bfloat16", "infos") for path in [name]} == {
        "flat f4": "tensor",
        "torch bfloat16": "torch",
        "infos": "object",
    }
    assert inputs["torch bfloat16"].dtype == torch.bfloat16
    assert inputs["infos"].tolist() == [batch["infos"][3]]
    assert inputs["flat U5"].tolist() == ["4"]
    assert inputs["squeezed"].tolist() == batch["squeezed"][3:4].decompress().values.tolist()
    stacked = batch.get_single_step_input_dict({"t": ViewRequirement("torch float32", shift="-1:0")}, index=0)
    assert stacked["t"].tolist() == [[0, 1]]


@pytest.mark.parametrize("padded", [False, True])
def test_steps_of_sequences_have_the_state_of_their_sequence(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    views = {"a": ViewRequirement(), "state_in_0": ViewRequirement(), "infos": ViewRequirement()}
    for index, row in enumerate(batch.rows()):
        inputs = batch.get_single_step_input_dict(views, index)
        assert inputs["a"].tolist() == [index]
        assert inputs["state_in_0"].tolist() == [row["state_in_0"].tolist()]
        assert inputs["infos"].tolist() == [{"step": index}]
    last = batch.get_single_step_input_dict({"state_in_0": ViewRequirement("state_out_0", shift=-1)})
    assert last["state_in_0"].tolist() == [[5.0]]


def test_the_result_is_for_training_if_the_batch_is(batch: SampleBatch) -> None:
    assert not batch.get_single_step_input_dict({"obs": ViewRequirement()}).is_training
    batch.set_training()
    assert batch.get_single_step_input_dict({"obs": ViewRequirement()}).is_training


def test_the_result_is_a_copy(batch: SampleBatch) -> None:
    inputs = batch.get_single_step_input_dict({"obs": ViewRequirement()}, 0)
    inputs["obs"][0] = 100
    assert batch["obs"][0] == 1


# -- ViewRequirement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shift", "steps"),
    [
        (0, [0]),
        (-1, [-1]),
        ([-2, 0], [-2, 0]),
        ("-3:0", [-3, -2, -1, 0]),
        ("-4:0:2", [-4, -2, 0]),
        ("-5:-5", [-5]),
        ("1:3", [1, 2, 3]),
    ],
    ids=str,
)
def test_shifts_are_listed(shift: Any, steps: list[int]) -> None:
    assert ViewRequirement(shift=shift).shift_arr.tolist() == steps


def test_the_ends_of_a_range_are_preserved() -> None:
    requirement = ViewRequirement(shift="-4:-1:3")
    assert (requirement.shift_from, requirement.shift_to, requirement.shift_step) == (-4, -1, 3)
    single = ViewRequirement(shift=-1)
    assert (single.shift_from, single.shift_to, single.shift_step) == (None, None, None)


@pytest.mark.parametrize("shift", ["", "a:b", "1", "1:2:3:4", "-1", "-3:", "-3:0:0"])
def test_a_string_that_is_not_a_range_is_rejected(shift: str) -> None:
    with pytest.raises(ValueError, match="shift must be"):
        ViewRequirement(shift=shift)


def test_attributes_of_a_view_requirement() -> None:
    space = object()
    requirement = ViewRequirement(
        "obs", space, 0, index=3, batch_repeat_value=2, used_for_compute_actions=False, used_for_training=False
    )
    assert requirement.data_col == "obs"
    assert requirement.space is space
    assert requirement.index == 3
    assert requirement.batch_repeat_value == 2
    assert not requirement.used_for_compute_actions
    assert not requirement.used_for_training
    default = ViewRequirement()
    assert default.data_col is None
    assert default.used_for_compute_actions
    assert default.used_for_training


def space_of_every_kind() -> Any:
    spaces = pytest.importorskip("gymnasium").spaces
    return spaces.Dict(
        {
            "box": spaces.Box(-1.0, np.array([1.0, np.inf], np.float32)),
            "pair": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2, start=-1)]),
            "many": spaces.MultiDiscrete([2, 3]),
            "bits": spaces.MultiBinary([2, 2]),
            "word": spaces.Text(5, min_length=2, charset="abc"),
        }
    )


def test_requirements_round_trip_through_json() -> None:
    requirement = ViewRequirement("obs", space_of_every_kind(), "-4:0:2", used_for_training=False, batch_repeat_value=4)
    actual = ViewRequirement.from_dict(json.loads(json.dumps(requirement.to_dict())))
    assert actual.space == requirement.space
    assert actual.shift_arr.tolist() == [-4, -2, 0]
    assert (actual.data_col, actual.used_for_training, actual.batch_repeat_value) == ("obs", False, 4)
    assert ViewRequirement.from_dict(ViewRequirement().to_dict()) == ViewRequirement()


def test_a_space_that_cannot_be_serialized_is_rejected() -> None:
    with pytest.raises(ArgumentError, match=r"a space must be one of Gymnasium's Box, .*, got a str"):
        ViewRequirement("obs", "box").to_dict()
    good = ViewRequirement("obs", space_of_every_kind()).to_dict()
    strange: list[Any] = [3, {}, "box", ["box"], {"space": ["box"]}]
    for damage in ({"space": "boxx"}, {"space": "discrete"}, {"space": "box", "low": "?"}, *strange):
        with pytest.raises(FormatError, match="a space must be described"):
            ViewRequirement.from_dict({**good, "space": damage})


@pytest.mark.filterwarnings("ignore")
def test_requirements_of_rllib_are_read(batch: SampleBatch) -> None:
    theirs = pytest.importorskip("ray.rllib.policy.view_requirement", exc_type=ImportError).ViewRequirement
    inputs = batch.get_single_step_input_dict(
        {
            "obs": theirs(),
            "prev_actions": theirs("actions", shift=-1),
            "window": theirs("obs", shift="-2:0"),
            "advantages": theirs(used_for_compute_actions=False),
        },
        index=2,
    )
    assert {name: inputs[name].tolist() for name in inputs} == {
        "obs": [3],
        "prev_actions": [10],
        "window": [[1, 2, 3]],
        "seq_lens": [1],
    }
    original = theirs("obs", space_of_every_kind(), shift=[-1, 0])
    assert ViewRequirement.from_dict(original.to_dict()) == ViewRequirement("obs", original.space, [-1, 0])
    assert theirs.from_dict(ViewRequirement.of(original).to_dict()).space == original.space
    with pytest.raises(ColumnTypeError, match="a view must be a ViewRequirement or RLlib's, got a str"):
        batch.get_single_step_input_dict({"obs": "obs"})
