"""Attributes of saved buffers, which every format validates against the ranges that buffers accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    HERReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
    load,
)
from samplebatch.batch.arrow import METADATA_KEY
from samplebatch.errors import FormatError
from samplebatch.storage.buffers.state import CHECKSUMS

h5py = pytest.importorskip("h5py")

FORMS = ("arrow", "parquet", "hdf5", "folder")


def filled(buffer: Any, n: int) -> Any:
    goals = {name: np.zeros((n, 1)) for name in ("observation", "achieved_goal", "desired_goal")}
    none = np.zeros(n, bool)
    steps = Batch(obs=goals, act=np.zeros(n), rew=np.zeros(n), obs_next=goals, terminated=none, truncated=none)
    buffer.add(steps if hasattr(buffer, "buffer_num") else steps[0])
    return buffer


BUFFERS: dict[str, Any] = {
    "plain": lambda: filled(ReplayBuffer(4), 1),
    "vector": lambda: filled(VectorReplayBuffer(8, 2), 2),
    "cached": lambda: filled(CachedReplayBuffer(ReplayBuffer(4), 2, 3), 2),
    "hindsight": lambda: filled(HERReplayBuffer(4, np.zeros_like, 10), 1),
    "prioritized": lambda: filled(PrioritizedReplayBuffer(4, alpha=0.6, beta=0.4), 1),
}


def save_changed(buffer: Any, folder: Path, form: str, part: tuple[str, ...], value: Any) -> Path:
    """Save a buffer whose description has one changed value."""

    def change(about: Any) -> str:
        inner = about
        for name in part[:-1]:
            inner = inner[name]
        inner[part[-1]] = value
        return json.dumps(about)

    path = folder / f"buffer.{form}" if form != "folder" else folder / "buffer"
    buffer.save(path)
    if form == "folder":
        text = json.loads((path / "buffer.json").read_text())
        change(text["about"])
        (path / "buffer.json").write_text(json.dumps({name: text[name] for name in text if name != "checksum"}))
    elif form == "hdf5":
        with h5py.File(path, "a") as file:
            file["_indices"].attrs["samplebatch"] = change(json.loads(file["_indices"].attrs["samplebatch"]))
    else:
        table = parquet.read_table(path) if form == "parquet" else pa.ipc.open_file(path).read_all()
        metadata = dict(table.schema.metadata)
        metadata[METADATA_KEY] = change(json.loads(metadata[METADATA_KEY])).encode()
        table = table.replace_schema_metadata(metadata)
        if form == "parquet":
            parquet.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("kind", "attribute", "value"),
    [
        ("plain", "stack_num", 0),
        ("plain", "stack_num", True),
        ("plain", "stack_num", 1 << 63),
        ("vector", "buffer_num", 3),
        ("vector", "_order", [1, 0]),
        ("vector", "_order", [0, 7]),
        ("vector", "_order", "01"),
        ("cached", "cached_buffer_num", 1),
        ("cached", "_order", [0]),
        ("hindsight", "horizon", 0),
        ("hindsight", "future_k", 0.5),
        ("hindsight", "future_k", 10**400),
        ("hindsight", "future_p", 1.5),
        ("hindsight", "future_p", "1"),
    ],
)
def test_attributes_out_of_range_are_rejected_in_every_format(
    form: str, kind: str, attribute: str, value: Any, tmp_path: Path
) -> None:
    if (kind, form) == ("hindsight", "folder"):
        pytest.skip("no folder holds a reward function")
    path = save_changed(BUFFERS[kind](), tmp_path, form, ("own", attribute), value)
    missing: dict[str, Any] = {"compute_reward_fn": np.zeros_like} if kind == "hindsight" else {}
    with pytest.raises(FormatError):
        load(path, verify=False, **missing)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [kind for kind in BUFFERS if kind != "hindsight"])
def test_a_rewritten_description_is_read(form: str, kind: str, tmp_path: Path) -> None:
    buffer = BUFFERS[kind]()
    again = load(save_changed(buffer, tmp_path, form, ("own", "_seed"), 5), verify=False)
    assert again._seed == 5
    assert len(again) == len(buffer)
    if form == "folder":
        again.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_seed_of_any_length_is_restored(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"buffer.{form}" if form != "folder" else tmp_path / "buffer"
    filled(VectorReplayBuffer(8, 2, random_seed=1 << 100), 2).save(path)
    again = load(path)
    assert again._seed == 1 << 100
    if form == "folder":
        again.close()


def test_a_folder_with_a_frame_stack_of_zero_is_rejected(tmp_path: Path) -> None:
    buffer = ReplayBuffer(4, storage=tmp_path / "buffer")
    buffer.__dict__["stack_num"] = 0
    filled(buffer, 1).close()
    with pytest.raises(FormatError, match="'stack_num'"):
        ReplayBuffer.open(tmp_path / "buffer")


@pytest.mark.parametrize("flag", ["terminated", "truncated", "done"])
@pytest.mark.parametrize(
    "change", [lambda column: None, lambda column: column.astype(np.int8)], ids=["lost", "numbers"]
)
def test_a_state_with_rows_must_have_their_flags(flag: str, change: Any) -> None:
    buffer = BUFFERS["plain"]()
    state = {name: part for name, part in buffer.state_dict().items() if name != CHECKSUMS}
    columns = state["table"]["columns"]
    at = columns["tree"][flag]
    changed = change(np.asarray(columns["columns"][at]))
    tree = dict(columns["tree"])
    if changed is None:
        # Its memory goes by another name, so that the structure has each column once.
        tree["other"] = tree.pop(flag)
        changed = columns["columns"][at]
    arrays = [*columns["columns"][:at], changed, *columns["columns"][at + 1 :]]
    state["table"] = state["table"] | {"columns": columns | {"tree": tree, "columns": arrays}}
    with pytest.raises(FormatError, match=f"column '{flag}' of a buffer must have one flag per row"):
        ReplayBuffer(4).load_state_dict(state)


@pytest.mark.parametrize("form", FORMS[:-1])
def test_a_buffer_must_have_the_state_of_its_generator(tmp_path: Path, form: str) -> None:
    path = save_changed(BUFFERS["plain"](), tmp_path, form, ("generator",), None)
    with pytest.raises(FormatError, match="state of a generator"):
        load(path, verify=False)


@pytest.mark.parametrize("form", ["arrow", "parquet", "hdf5"])
def test_a_stack_of_far_more_frames_than_steps_is_rejected(tmp_path: Path, form: str) -> None:
    buffer = filled(ReplayBuffer(4), 1)
    buffer.stack_num = 1 << 27
    buffer.save(tmp_path / f"buffer.{form}")
    with pytest.raises(FormatError, match="attribute 'stack_num' of a ReplayBuffer must be at most its steps"):
        load(tmp_path / f"buffer.{form}")
    buffer.stack_num = 9
    buffer.save(tmp_path / f"buffer.{form}")
    assert load(tmp_path / f"buffer.{form}").stack_num == 9
