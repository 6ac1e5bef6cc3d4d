"""Saved and restored buffers continue exactly."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import Batch
from samplebatch.buffer.prioritized import PrioritizedReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.vector import VectorReplayBuffer
from samplebatch.errors import (
    ColumnMismatchError,
    ColumnTypeError,
    FormatError,
    RingError,
    SampleBatchError,
    UntrustedPickleError,
)
from samplebatch.storage.buffers import state as buffer_state
from samplebatch.storage.buffers.state import check_rings
from tests.storage import streams
from tests.storage.streams import BUFFERS, OTHERS, assert_go_on_alike, assert_same_rows, fill, mixed, step

ALL = BUFFERS | OTHERS


def by_pickle(buffer: Any, make: Any, path: Path) -> Any:
    return pickle.loads(pickle.dumps(buffer))


def by_copy(buffer: Any, make: Any, path: Path) -> Any:
    return copy.deepcopy(buffer)


def by_state(buffer: Any, make: Any, path: Path) -> Any:
    other = make()
    other.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
    return other


def by_arrow(buffer: Any, make: Any, path: Path) -> Any:
    buffer.save(path / "buffer.arrow")
    return type(buffer).load(path / "buffer.arrow")


def by_hdf5(buffer: Any, make: Any, path: Path) -> Any:
    pytest.importorskip("h5py")
    buffer.save_hdf5(path / "buffer.hdf5")
    return type(buffer).load_hdf5(path / "buffer.hdf5")


WAYS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "pickle": by_pickle,
    "copy": by_copy,
    "state_dict": by_state,
    "arrow": by_arrow,
    "hdf5": by_hdf5,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ALL)
def test_a_buffer_resumes_exactly(kind: str, way: str, tmp_path: Path) -> None:
    make, n = ALL[kind]
    for steps in (0, 3, 17, 46):
        buffer = make()
        fill(buffer, n, 0, steps)
        if steps:
            buffer.sample(3)
        assert_go_on_alike(WAYS[way](buffer, make, tmp_path), buffer, n, steps)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ignore", [False, True])
def test_objects_strings_dates_and_ragged_rows_are_included(way: str, ignore: bool, tmp_path: Path) -> None:
    def make() -> Any:
        return VectorReplayBuffer(21, 3, ignore_obs_next=ignore)

    for steps in (2, 30):
        buffer = make()
        fill(buffer, 3, 0, steps, mixed)
        assert_go_on_alike(WAYS[way](buffer, make, tmp_path), buffer, 3, steps, mixed)


@pytest.mark.parametrize("way", WAYS)
def test_tensors_are_included(way: str, tmp_path: Path) -> None:
    import torch

    def first(i: int, n: int) -> dict[str, Any]:
        return streams.numbers(i, n) | {
            "policy": {"hidden": torch.full((n, 2), float(i)), "half": torch.full((n,), i, dtype=torch.bfloat16)}
        }

    buffer = ReplayBuffer(9)
    fill(buffer, 0, 0, 13, first)
    other = WAYS[way](buffer, lambda: ReplayBuffer(9), tmp_path)
    for name in ("hidden", "half"):
        ours, theirs = buffer[:].policy[name], other[:].policy[name]
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_resets_and_running_statistics_are_included(way: str, tmp_path: Path) -> None:
    make, n = BUFFERS["vector"]
    for keep in (False, True):
        buffer = make()
        fill(buffer, n, 0, 11)
        generation = buffer._table.rings.generation(np.arange(21))
        buffer.reset(keep_statistics=keep)
        buffer.buffers[1].reset()
        other = WAYS[way](buffer, make, tmp_path)
        assert len(other) == 0
        assert_go_on_alike(other, buffer, n, 12)
        assert (other._table.rings.generation(np.arange(21)) > generation).all()


@pytest.mark.parametrize("way", WAYS)
def test_vector_rewards_and_rings_of_different_length_are_included(way: str, tmp_path: Path) -> None:
    def vectors(i: int, n: int) -> dict[str, Any]:
        values = streams.numbers(i, n)
        return values | {"rew": values["rew"][:, None] * [1.0, -1.0]}

    def make() -> Any:
        return VectorReplayBuffer(21, 3)

    buffer = make()
    for i in range(25):
        buffer.add(Batch(vectors(i, 2)), buffer_ids=[i % 3, (i + 1) % 3] if i % 4 else [2, 0])
    assert_go_on_alike(WAYS[way](buffer, make, tmp_path), buffer, 3, 25, vectors)


@pytest.mark.parametrize("way", ["pickle", "arrow", "hdf5"])
def test_a_part_is_saved_as_a_separate_buffer(way: str, tmp_path: Path) -> None:
    for kind in ("vector", "vector ignoring next", "prioritized vector"):
        make, n = BUFFERS[kind]
        buffer = make()
        fill(buffer, n, 0, 20)
        part = buffer.buffers[1]
        other = WAYS[way](part, make, tmp_path)
        assert type(other) is type(part)
        assert other.maxsize == 7
        assert other[:].obs == part[:].obs
        assert other[:].obs_next == part[:].obs_next
        other.add(step(99, 0))
        assert len(part) == 7


def test_only_live_rows_are_written(tmp_path: Path) -> None:
    buffer = ReplayBuffer(100_000)
    buffer.add(step(0, 0))
    assert len(pickle.dumps(buffer)) < 10_000
    for way in ("arrow", "hdf5"):
        WAYS[way](buffer, None, tmp_path)
        assert (tmp_path / f"buffer.{way}").stat().st_size < 2_000_000
    assert len(pickle.dumps(buffer.state_dict())) < 10_000


def test_compressed_rows_are_compressed_in_pickles() -> None:
    buffer = ReplayBuffer(1000, compress="obs", ignore_obs_next=True)
    for i in range(1000):
        buffer.add(
            Batch(obs=np.full((50, 50), i % 250, np.uint8), act=0, rew=0.0, terminated=False, truncated=i % 9 == 8)
        )
    pickled = pickle.dumps(buffer)
    assert len(pickled) < 1000 * 2500 / 10
    other = pickle.loads(pickled)
    assert other._table.columns.tree["obs"].kind == "compressed"
    assert other.nbytes < 1000 * 2500 / 10
    assert_same_rows(other, buffer)


def test_files_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from samplebatch.storage.buffers import file as buffer_file

    monkeypatch.setattr(buffer_file, "_PART_NBYTES", 1_500)
    for kind in ("vector ignoring next", "prioritized vector", "compressed"):
        make, n = ALL[kind]
        buffer = make()
        fill(buffer, n, 0, 46)
        other = by_arrow(buffer, make, tmp_path)
        with pa.memory_map(str(tmp_path / "buffer.arrow")) as source:
            assert pa.ipc.open_file(source).num_record_batches > 2
        assert_go_on_alike(other, buffer, n, 46)
    buffer = VectorReplayBuffer(21, 3, ignore_obs_next=True)
    fill(buffer, 3, 0, 30, mixed)
    assert_go_on_alike(by_arrow(buffer, None, tmp_path), buffer, 3, 30, mixed)


def test_a_file_is_a_table_for_other_tools(tmp_path: Path) -> None:
    buffer = ReplayBuffer(8, ignore_obs_next=True)
    fill(buffer, 0, 0, 12)
    buffer.save(tmp_path / "buffer.arrow")
    with pa.memory_map(str(tmp_path / "buffer.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.num_rows == 8
    assert table.column("rew").to_pylist() == [8, 9, 10, 11, 4, 5, 6, 7]
    assert table.column("obs.x").chunk(0).to_numpy_ndarray().tolist()[0] == [8, 8, 8]
    # Truncated steps, and the newest one.
    finals = [np.asarray(rows).ravel().tolist() for rows in table.column("obs_next.x").to_pylist()]
    assert finals == [[], [10, 10, 10], [], [12, 12, 12], [5, 5, 5], [], [], []]


def test_a_file_replaces_another_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "buffer.arrow"
    buffer = ReplayBuffer(8)
    fill(buffer, 0, 0, 3)
    buffer.save(path)
    fill(buffer, 0, 3, 5)
    buffer._table.columns.tree["info"]["bad"] = type("Bad", (), {"__reduce__": lambda self: 1 / 0})
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever goes wrong
        buffer.save(path)
    assert len(ReplayBuffer.load(path)) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["buffer.arrow"]


@pytest.mark.parametrize("name", ["priorities\nPrioritized", "stores\nStores", "stores\nzeroed"])
def test_class_names_in_older_pickles_are_importable(name: str) -> None:
    assert callable(pickle.loads(f"csamplebatch.buffer.{name}\n.".encode()))


def test_objects_are_unpickled_only_if_allowed(tmp_path: Path) -> None:
    buffer = ReplayBuffer(4)
    buffer.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, info={"path": Path("a")}))
    buffer.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, info={"path": 3}))
    buffer.save(tmp_path / "buffer.arrow")
    with pytest.raises(UntrustedPickleError, match=r"column 'info\.path' holds pickled objects"):
        ReplayBuffer.load(tmp_path / "buffer.arrow")
    other = ReplayBuffer.load(tmp_path / "buffer.arrow", allow_pickle=True)
    assert other[:].info.path.tolist() == [Path("a"), 3]


def test_classes_are_checked(tmp_path: Path) -> None:
    make, n = BUFFERS["vector"]
    buffer = make()
    fill(buffer, n, 0, 5)
    buffer.save(tmp_path / "buffer.arrow")
    assert type(ReplayBuffer.load(tmp_path / "buffer.arrow")) is VectorReplayBuffer
    with pytest.raises(FormatError, match="must be a PrioritizedReplayBuffer, got a VectorReplayBuffer"):
        PrioritizedReplayBuffer.load(tmp_path / "buffer.arrow")

    class Own(ReplayBuffer):
        """Subclass that a user defines."""

    custom = Own(5)
    custom.tag = "mine"
    fill(custom, 0, 0, 3)
    custom.save(tmp_path / "own.arrow")
    actual = ReplayBuffer.load(tmp_path / "own.arrow")
    assert type(actual) is Own
    assert actual.tag == "mine"


def test_functions_are_passed_when_a_buffer_is_loaded(tmp_path: Path) -> None:
    hindsight = pytest.importorskip("samplebatch.buffer.hindsight")

    def reached(achieved: Any, desired: Any) -> Any:
        return (achieved == desired).all(-1).astype(float)

    def goal(i: int) -> dict[str, Any]:
        return {"observation": np.zeros(2), "achieved_goal": np.full(1, i), "desired_goal": np.full(1, 9)}

    buffer = hindsight.HERReplayBuffer(20, reached, 10, 4.0)
    for i in range(15):
        buffer.add(
            Batch(obs=goal(i), act=0, rew=0.0, terminated=i % 5 == 4, truncated=False, obs_next=goal(i + 1), info={})
        )
    retained = {"arrow": "load", "hdf5": "load_hdf5"}
    pytest.importorskip("h5py")
    for way, load in retained.items():
        path = tmp_path / f"buffer.{way}"
        if way == "arrow":
            buffer.save(path)
        else:
            with pytest.raises(NotImplementedError, match="'compute_reward_fn'"):
                buffer.save_hdf5(path)
            buffer.compute_reward_fn = len
            buffer.save_hdf5(path)
            buffer.compute_reward_fn = reached
            assert hindsight.HERReplayBuffer.load_hdf5(path, allow_pickle=True).compute_reward_fn is len
        with pytest.raises(
            FormatError, match="'compute_reward_fn', which files cannot store, must be passed for a HERReplayBuffer"
        ):
            getattr(hindsight.HERReplayBuffer, load)(path)
        with pytest.raises(TypeError, match="has no argument 'reward_fn' to pass; did you mean"):
            getattr(hindsight.HERReplayBuffer, load)(path, compute_reward_fn=reached, reward_fn=1)
        other = getattr(hindsight.HERReplayBuffer, load)(path, compute_reward_fn=reached)
        assert (other.horizon, other.future_p) == (10, 0.75)
        assert other.compute_reward_fn is reached
        first, second = copy.deepcopy(buffer).sample(8), other.sample(8)
        assert first[0] == second[0]
        assert np.array_equal(first[1], second[1])


def test_a_state_of_another_buffer_is_rejected_without_changes() -> None:
    buffer = ReplayBuffer(6)
    fill(buffer, 0, 0, 4)
    before = pickle.dumps(buffer)
    state = buffer.state_dict()
    others: list[tuple[Any, str]] = [
        (ReplayBuffer(7).state_dict(), r"must have rings of \[6\] slots, got \[7\]"),
        (VectorReplayBuffer(6, 1).state_dict(), "must be a ReplayBuffer's, got a VectorReplayBuffer's"),
        (ReplayBuffer(6, ignore_obs_next=True).state_dict(), "the same 'ignore_obs_next'"),
        (ReplayBuffer(6, save_only_last_obs=True).state_dict(), "the same 'save_only_last_obs'"),
    ]
    for other, actual in others:
        with pytest.raises(ColumnMismatchError, match=actual):
            buffer.load_state_dict(other)
    damaged: list[Any] = [
        {},
        state | {"version": 99},
        state | {"generator": {"bit_generator": "PCG64"}},
        state | {"generator": {"bit_generator": "default_rng"}},
        state | {"sampler": {"kind": "other"}},
        state | {"table": {}},
        state | {"table": state["table"] | {"columns": state["table"]["columns"] | {"row_shapes": []}}},
        state | {"table": state["table"] | {"rings": state["table"]["rings"] | {"cursors": np.array([9])}}},
        state | {"table": state["table"] | {"rings": state["table"]["rings"] | {"sizes": np.array([5])}}},
    ]
    for other in damaged:
        with pytest.raises(FormatError):
            buffer.load_state_dict(other)
    assert pickle.dumps(buffer) == before
    vector = VectorReplayBuffer(6, 2)
    with pytest.raises(RingError, match="the target of a state must be an entire buffer, got a part"):
        vector.buffers[0].load_state_dict(state)


def test_parts_use_the_loaded_state() -> None:
    make, n = BUFFERS["prioritized vector"]
    buffer, other = make(), make()
    fill(buffer, n, 0, 30)
    parts = other.buffers
    other.load_state_dict(buffer.state_dict())
    assert parts[2][:].obs == buffer.buffers[2][:].obs
    assert np.array_equal(parts[2][:].weight, buffer.buffers[2][:].weight)
    fill(other, n, 30, 33)
    assert len(parts[0]) == 7


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the description of the buffer in a file."""
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    about = json.loads(table.schema.metadata[b"samplebatch"])
    change(about)
    table = table.replace_schema_metadata({b"samplebatch": json.dumps(about).encode()})
    with pa.OSFile(f"{path}.new", "w") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    Path(f"{path}.new").replace(path)


def no_type(about: dict[str, Any]) -> None:
    about["type"] = "SampleBatch"


def later_version(about: dict[str, Any]) -> None:
    about["version"] = 2


def no_rings(about: dict[str, Any]) -> None:
    del about["rings"]


def more_rows(about: dict[str, Any]) -> None:
    about["rings"]["sizes"][0] -= 1
    about["rings"]["cursors"][0] -= 1
    about["rings"]["together"] = False


def other_structure(about: dict[str, Any]) -> None:
    about["structure"]["tree"]["obs"] = 3


def missing_structure(about: dict[str, Any]) -> None:
    about["structure"]["tree"]["act"] = {}


def other_kind(about: dict[str, Any]) -> None:
    about["structure"]["kinds"][0] = "torch"


def a_method(about: dict[str, Any]) -> None:
    about["own"]["add"] = 3


def no_attributes(about: dict[str, Any]) -> None:
    about["own"] = None


def other_finals(about: dict[str, Any]) -> None:
    about["finals"]["room"] = 1


def huge_finals(about: dict[str, Any]) -> None:
    about["finals"]["room"] = 10**12


def bad_weights(about: dict[str, Any]) -> None:
    about["sampler"]["known"]["alpha"] = "x"


def a_module(about: dict[str, Any]) -> None:
    about["class"] = "os"


@pytest.mark.parametrize(
    "change",
    [
        no_type, later_version, no_rings, more_rows, other_structure, missing_structure, a_method, no_attributes,
        other_finals, huge_finals, bad_weights, a_module,
    ],
)  # fmt: skip
def test_an_inconsistent_file_is_rejected(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "buffer.arrow"
    kind = "prioritized vector" if change is bad_weights else "vector ignoring next"
    make, n = BUFFERS[kind]
    buffer = make()
    fill(buffer, n, 0, 5)
    buffer.save(path)
    rewritten(path, change)
    with pytest.raises(FormatError):
        ReplayBuffer.load(path)


def test_damaged_files_are_rejected_or_decoded(tmp_path: Path) -> None:
    path = tmp_path / "buffer.arrow"
    buffer = ReplayBuffer(8, ignore_obs_next=True)
    fill(buffer, 0, 0, 12)
    buffer.save(path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for length in rng.integers(0, len(data), 60).tolist():
        path.write_bytes(data[:length])
        with pytest.raises((FormatError, ColumnTypeError)):
            ReplayBuffer.load(path)
    path.write_bytes(b"PK\x03\x04" + data)
    with pytest.raises(FormatError, match="got other first bytes"):
        ReplayBuffer.load(path)
    with pytest.raises(FileNotFoundError):
        ReplayBuffer.load(tmp_path / "none.arrow")


@pytest.mark.parametrize("bits", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_the_state_of_numpy_generators_is_restored(bits: str) -> None:
    rng = np.random.Generator(getattr(np.random, bits)(7))
    rng.integers(10, size=3)
    state = json.loads(json.dumps(buffer_state.generator_state(rng)))
    other = buffer_state.generator_from_state(state)
    assert np.array_equal(other.integers(2**60, size=10), rng.integers(2**60, size=10))
    assert np.array_equal(other.random(10), rng.random(10))


@pytest.mark.parametrize(
    "changed",
    [
        {"cursors": [-1, 0, 0]},
        {"cursors": [7, 0, 0]},
        {"sizes": [8, 5, 5]},
        {"sizes": [5.0, 5.0, 5.0]},
        {"starts": [-1, 7, 14]},
        {"starts": [7, 7, 14]},
        {"writes": [1, 5, 5]},
        {"began": [6, 5, 5]},
        {"returns": [0.0]},
        {"maxsizes": [7, 7]},
        {"maxsizes": []},
        {"sizes": [5, 4, 5], "cursors": [5, 4, 5]},
        {"returns": None},
    ],
)
def test_impossible_states_of_rings_are_rejected(changed: dict[str, Any]) -> None:
    make, n = BUFFERS["vector"]
    buffer = make()
    fill(buffer, n, 0, 5)
    state = buffer._table.rings.state_dict()
    check_rings(state)
    with pytest.raises(FormatError):
        check_rings(state | changed)


def test_invalid_states_raise_library_errors() -> None:
    with pytest.raises(SampleBatchError):
        ReplayBuffer(3).load_state_dict({"class": "ReplayBuffer", "version": 1})
