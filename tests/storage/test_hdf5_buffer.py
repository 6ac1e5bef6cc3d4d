"""Replay buffers in HDF5 files can be exchanged with Tianshou in both directions and continue equally."""

from __future__ import annotations

import json
import os
import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch
from samplebatch.buffer.hindsight import HERReplayBuffer, HERVectorReplayBuffer
from samplebatch.buffer.prioritized import (
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferManager,
    PrioritizedVectorReplayBuffer,
)
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.vector import CachedReplayBuffer, ReplayBufferManager, VectorReplayBuffer
from samplebatch.errors import FormatError, UnstorableError, UntrustedPickleError

h5py = pytest.importorskip("h5py")
tianshou = pytest.importorskip("tianshou.data")

CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], int]] = {
    "plain": (ReplayBuffer, (20,), {}, 0),
    "stacked": (ReplayBuffer, (20,), {"stack_num": 2, "ignore_obs_next": True}, 0),
    "vector": (VectorReplayBuffer, (20, 2), {}, 2),
    "vector ignoring next": (VectorReplayBuffer, (20, 2), {"ignore_obs_next": True, "sample_avail": True}, 2),
    "prioritized": (PrioritizedReplayBuffer, (20,), {"alpha": 0.6, "beta": 0.4}, 0),
    "prioritized vector": (
        PrioritizedVectorReplayBuffer,
        (20, 2),
        {"alpha": 0.6, "beta": 0.4, "weight_norm": False},
        2,
    ),
}


def step(make: Any, i: int, n: int) -> Any:
    """Return step i of n environments as a batch of this library or Tianshou."""
    many = max(n, 1)
    batch = make(
        obs={"x": np.full((many, 3), i, np.float32), "image": np.full((many, 4, 4), i, np.uint8)},
        act=np.arange(many) + i,
        rew=np.ones(many) * i,
        terminated=np.full(many, i % 7 == 6),
        truncated=np.full(many, i % 5 == 4),
        obs_next={"x": np.full((many, 3), i + 1, np.float32), "image": np.full((many, 4, 4), i + 1, np.uint8)},
        info={"lives": np.full(many, i % 3)},
    )
    return batch if n else batch[0]


def plain(batch: Any) -> dict[str, Any]:
    """Convert rows to arrays by dotted names, without samplers' columns, generations and empty names."""
    actual = {}
    for name in batch.__dict__:
        value = batch.__dict__[name]
        if isinstance(value, np.ndarray):
            actual[name] = value
        else:
            actual |= {f"{name}.{inner}": leaf for inner, leaf in plain(value).items()}
    return {name: value for name, value in actual.items() if name not in ("weight", "generation")}


def same(a: Any, b: Any, leave_out: str = "nothing") -> bool:
    rows, others = plain(a), plain(b)
    assert rows.keys() == others.keys()
    return all(
        np.array_equal(rows[name], others[name]) and rows[name].dtype == others[name].dtype
        for name in rows
        if not name.startswith(leave_out)
    )


@pytest.mark.parametrize(("steps", "compression"), [(0, None), (3, "gzip"), (33, None)])
@pytest.mark.parametrize("case", CASES)
def test_files_are_interchangeable_with_tianshou(
    case: str, steps: int, compression: str | None, tmp_path: Path
) -> None:
    cls, args, options, n = CASES[case]
    their_cls = getattr(tianshou, cls.__name__)
    ours, theirs = cls(*args, **options), their_cls(*args, **options)
    for i in range(steps):
        ours.add(step(Batch, i, n))
        theirs.add(step(tianshou.Batch, i, n))
    if "alpha" in options and steps:
        for buffer in (ours, theirs):
            buffer.update_weight(np.array([1, 2]), np.array([3.0, 7.0]))
    paths = [str(tmp_path / name) for name in ("ours", "theirs", "ours by them")]
    ours.save_hdf5(paths[0], compression)
    theirs.save_hdf5(paths[1], compression)
    their_copy = their_cls.load_hdf5(paths[0])
    their_copy.save_hdf5(paths[2])
    copies = [cls.load_hdf5(path) for path in paths]
    assert all(type(copy) is cls for copy in copies)
    # Where next observations are not stored, theirs are not right where an episode was cut or runs on.
    guessed = "obs_next" if options.get("ignore_obs_next") else "nothing"
    for i in range(steps, steps + 30):
        if i in (steps + 1, steps + 29):
            assert same(ours[:], copies[0][:])
            for buffer in (theirs, their_copy, *copies[1:]):
                assert same(ours[:], buffer[:], guessed)
        if i in (steps + 1, steps + 29) and "alpha" in options:
            index = ours.sample_indices(0)
            for buffer in (theirs, their_copy, *copies):
                assert np.allclose(buffer.get_weight(index), ours.get_weight(index))
        added = [buffer.add(step(Batch, i, n)) for buffer in (ours, *copies)]
        added += [buffer.add(step(tianshou.Batch, i, n)) for buffer in (theirs, their_copy)]
        for other in added[1:]:
            assert all(map(np.array_equal, other, added[0]))
    index = ours.sample_indices(0)
    for buffer in (theirs, their_copy, *copies):
        assert np.array_equal(buffer.sample_indices(0), index)
        assert np.array_equal(buffer.prev(index), ours.prev(index))
        assert np.array_equal(buffer.next(index), ours.next(index))
    assert np.array_equal(copies[0].sample_indices(9), ours.sample_indices(9))
    assert their_copy.sample(4)[0].act.shape == (4,)
    assert (their_copy.stack_num, their_copy.maxsize) == (ours.stack_num, ours.maxsize)


def test_managers_and_caches_are_interchangeable_with_tianshou(tmp_path: Path) -> None:
    path = str(tmp_path / "buffer.hdf5")
    manager = ReplayBufferManager([ReplayBuffer(4), ReplayBuffer(9)])
    their_manager = tianshou.ReplayBufferManager([tianshou.ReplayBuffer(4), tianshou.ReplayBuffer(9)])
    cache = CachedReplayBuffer(ReplayBuffer(20), 2, 9)
    their_cache = tianshou.CachedReplayBuffer(tianshou.ReplayBuffer(20), 2, 9)
    weighted = PrioritizedReplayBufferManager([PrioritizedReplayBuffer(size, 0.5, 0.5) for size in (4, 9)])
    their_weighted = tianshou.PrioritizedReplayBufferManager(
        [tianshou.PrioritizedReplayBuffer(size, 0.5, 0.5) for size in (4, 9)]
    )
    for ours, theirs in ((manager, their_manager), (cache, their_cache), (weighted, their_weighted)):
        for i in range(11):
            ours.add(step(Batch, i, 2))
            theirs.add(step(tianshou.Batch, i, 2))
        theirs.save_hdf5(path)
        copy = type(ours).load_hdf5(path)
        assert type(copy) is type(ours)
        ours.save_hdf5(path)
        their_copy = type(theirs).load_hdf5(path)
        assert len(their_copy) == len(copy) == len(ours)
        for i in range(11, 30):
            added = [buffer.add(step(Batch, i, 2)) for buffer in (ours, copy)]
            # Tianshou's own cache moves episodes into a main buffer that is another one after loading.
            others = [theirs] if theirs is their_cache else [theirs, their_copy]
            added += [buffer.add(step(tianshou.Batch, i, 2)) for buffer in others]
            for other in added[1:]:
                assert all(map(np.array_equal, other, added[0]))
        assert same(copy[:], ours[:])
        assert same(theirs[:], ours[:])


def reached(achieved: Any, desired: Any) -> Any:
    return (achieved == desired).all(-1).astype(float)


def goal(make: Any, i: int, n: int) -> Any:
    achieved = np.full((max(n, 1), 1), i)
    batch = make(
        obs={"observation": achieved, "achieved_goal": achieved, "desired_goal": achieved * 0 + 9},
        act=achieved[:, 0],
        rew=achieved[:, 0] * 1.0,
        terminated=np.full(len(achieved), i % 5 == 4),
        truncated=np.zeros(len(achieved), bool),
        obs_next={"observation": achieved + 1, "achieved_goal": achieved + 1, "desired_goal": achieved * 0 + 9},
        info={},
    )
    return batch if n else batch[0]


def test_hindsight_buffers_are_interchangeable_with_tianshou(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tianshou pickles the function, so it must be one that can be imported.
    monkeypatch.setitem(sys.modules, "rewards", type(sys)("rewards"))
    monkeypatch.setattr(reached, "__module__", "rewards")
    sys.modules["rewards"].reached = reached
    path = str(tmp_path / "buffer.hdf5")
    pairs = [
        (HERReplayBuffer(20, reached, 10, 4.0), tianshou.HERReplayBuffer(20, reached, 10, 4.0), 0),
        (HERVectorReplayBuffer(20, 2, compute_reward_fn=reached, horizon=10, future_k=4.0), None, 2),
    ]
    for ours, theirs, n in pairs:
        if theirs is None:
            theirs = tianshou.HERVectorReplayBuffer(20, 2, compute_reward_fn=reached, horizon=10, future_k=4.0)
        for i in range(13):
            ours.add(goal(Batch, i, n))
            theirs.add(goal(tianshou.Batch, i, n))
        theirs.save_hdf5(path)
        with pytest.raises(
            FormatError, match=r"'compute_reward_fn', which files cannot store, must be passed for a \w+"
        ):
            type(ours).load_hdf5(path)
        for copy in (
            type(ours).load_hdf5(path, compute_reward_fn=reached),
            type(ours).load_hdf5(path, allow_pickle=True),
        ):
            assert type(copy) is type(ours)
            assert (copy.horizon, copy.future_p) == (10, 0.75)
            assert copy.compute_reward_fn is reached
            assert same(copy[:], ours[:])
            assert len(copy.sample(6)[0]) == 6
        ours.save_hdf5(path)
        their_copy = type(theirs).load_hdf5(path)
        part = their_copy.buffers[1] if n else their_copy
        assert (part.horizon, part.future_p) == (10, 0.75)
        assert len(their_copy.sample(6)[0]) == 6


@pytest.mark.parametrize("absent", ["stack_num", "sample_avail", "ignore_obs_next"])
def test_a_file_without_an_option_is_rejected(absent: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(4)
    buffer.add(Batch(obs=1, act=0, rew=0.0, terminated=False, truncated=False, obs_next=2))
    buffer.save_hdf5(tmp_path / "buffer.hdf5")
    with h5py.File(tmp_path / "buffer.hdf5", "a") as file:
        about = json.loads(file["_indices"].attrs["samplebatch"])
        del about["own"]["options"][absent]
        file["_indices"].attrs["samplebatch"] = json.dumps(about)
    with pytest.raises(FormatError):
        ReplayBuffer.load_hdf5(tmp_path / "buffer.hdf5", verify=False)


@pytest.mark.parametrize("attribute", ["horizon", "future_k"])
@pytest.mark.parametrize("value", [None, "many", 0, -1.5])
def test_a_hindsight_file_without_its_attributes_is_rejected(attribute: str, value: Any, tmp_path: Path) -> None:
    buffer = HERReplayBuffer(4, len, 10)
    buffer.add(goal(Batch, 0, 0))
    buffer.save_hdf5(tmp_path / "buffer.hdf5")
    with h5py.File(tmp_path / "buffer.hdf5", "a") as file:
        about = json.loads(file["_indices"].attrs["samplebatch"])
        about["own"][attribute] = value
        if value is None:
            del about["own"][attribute]
        file["_indices"].attrs["samplebatch"] = json.dumps(about)
    with pytest.raises(FormatError, match=f"'{attribute}'"):
        HERReplayBuffer.load_hdf5(tmp_path / "buffer.hdf5", compute_reward_fn=len, verify=False)


def test_the_file_of_the_documentation(tmp_path: Path) -> None:
    buffer = ReplayBuffer(size=20)
    for i in range(3):
        buffer.add(Batch(obs=i, act=i, rew=i, terminated=0, truncated=0, obs_next=i + 1, info={}))
    buffer.save_hdf5(tmp_path / "buf.hdf5")
    buffer = ReplayBuffer.load_hdf5(tmp_path / "buf.hdf5")
    assert len(buffer) == 3
    assert buffer.obs.tolist()[:4] == [0, 1, 2, 0]
    assert tianshou.ReplayBuffer.load_hdf5(str(tmp_path / "buf.hdf5"))[:].obs.tolist() == [0, 1, 2]


def test_tianshou_loads_files_without_this_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "buffer.hdf5")
    buffer = PrioritizedVectorReplayBuffer(20, 2, alpha=0.6, beta=0.4)
    for i in range(13):
        buffer.add(step(Batch, i, 2))
    buffer.save_hdf5(path)
    for module in [name for name in sys.modules if name.partition(".")[0] == "samplebatch"]:
        # Neither this nor unpickling a class of it succeeds then.
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError):
        import_module("samplebatch")
    theirs = tianshou.PrioritizedVectorReplayBuffer.load_hdf5(path)
    assert isinstance(theirs.buffers[1], tianshou.PrioritizedReplayBuffer)
    assert isinstance(theirs.buffers[1].weight, tianshou.SegmentTree)
    assert (len(theirs), theirs.sample(5)[0].act.shape, theirs.buffers[0].rew.sum()) == (20, (5,), 75.0)
    assert theirs.unfinished_index().tolist() == [2, 12]


def test_old_files_with_only_done_flags_are_read(tmp_path: Path) -> None:
    path = str(tmp_path / "buffer.hdf5")
    theirs = tianshou.ReplayBuffer(6)
    for i in range(5):
        theirs.add(step(tianshou.Batch, i, 0))
    theirs.save_hdf5(path)
    with h5py.File(path, "a") as file:
        del file["_meta/terminated"], file["_meta/truncated"]
    buffer = ReplayBuffer.load_hdf5(path)
    assert buffer[:].terminated.tolist() == [False, False, False, False, True]
    assert not buffer[:].truncated.any()


def test_objects_and_strings_of_tianshou_are_read_without_unpickling(tmp_path: Path) -> None:
    path = str(tmp_path / "buffer.hdf5")
    theirs = tianshou.ReplayBuffer(4)
    for i in range(6):
        batch = step(tianshou.Batch, i, 0)
        batch.info = {"text": f"é{i}", "what": None if i % 2 else f"x{i}"}
        theirs.add(batch)
    theirs.save_hdf5(path)
    buffer = ReplayBuffer.load_hdf5(path)
    assert buffer[:].info.text.tolist() == ["é2", "é3", "é4", "é5"]
    assert buffer[:].info.what.tolist() == ["x2", None, "x4", None]
    theirs.info.what[0] = Path("x")
    theirs.save_hdf5(path)
    with pytest.raises(UntrustedPickleError, match="'/_meta/info/what' holds pickled objects"):
        ReplayBuffer.load_hdf5(path)
    assert ReplayBuffer.load_hdf5(path, allow_pickle=True)[0].info.what == Path("x")


class Malice:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/should_never_exist_of_samplebatch",)


@pytest.mark.parametrize("position", ["weight", "buffers", "_random_state", "compute_reward_fn", "_meta/act"])
def test_no_code_in_a_file_is_executed(tmp_path: Path, position: str) -> None:
    path = str(tmp_path / "buffer.hdf5")
    theirs = tianshou.PrioritizedVectorReplayBuffer(6, 2, alpha=0.5, beta=0.5)
    for i in range(5):
        theirs.add(step(tianshou.Batch, i, 2))
    theirs.save_hdf5(path)
    with h5py.File(path, "a") as file:
        if position in file:
            del file[position]
        file[position] = np.frombuffer(pickle.dumps(Malice()), np.int8)
        file[position].attrs["__data_type__"] = "object"
    if position in ("_random_state", "compute_reward_fn"):
        assert len(PrioritizedVectorReplayBuffer.load_hdf5(path)) == 6
    else:
        with pytest.raises((FormatError, UntrustedPickleError)):
            PrioritizedVectorReplayBuffer.load_hdf5(path)
    assert not Path("/tmp/should_never_exist_of_samplebatch").exists()


def test_draws_after_loading_tianshou_files_are_deterministic(tmp_path: Path) -> None:
    draws = []
    for seed in (1, 1, 2):
        theirs = tianshou.ReplayBuffer(100, random_seed=seed)
        for i in range(50):
            theirs.add(step(tianshou.Batch, i, 0))
        theirs.save_hdf5(str(tmp_path / "buffer.hdf5"))
        draws.append(ReplayBuffer.load_hdf5(tmp_path / "buffer.hdf5").sample_indices(20).tolist())
    assert draws[0] == draws[1] != draws[2]


def test_classes_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "buffer.hdf5"
    theirs = tianshou.VectorReplayBuffer(6, 2)
    theirs.save_hdf5(str(path))
    assert type(ReplayBuffer.load_hdf5(path)) is VectorReplayBuffer
    assert type(ReplayBufferManager.load_hdf5(path)) is ReplayBufferManager
    with pytest.raises(FormatError, match="must be a PrioritizedVectorReplayBuffer, got a VectorReplayBuffer"):
        PrioritizedVectorReplayBuffer.load_hdf5(path)


def cut(file: Any) -> None:
    del file["_meta/act"]
    file["_meta/act"] = np.zeros(3)
    file["_meta/act"].attrs["__data_type__"] = "ndarray"


def no_cursor(file: Any) -> None:
    del file.attrs["_insertion_idx"]


def wrong_cursor(file: Any) -> None:
    file.attrs["_insertion_idx"] = 77


def no_columns(file: Any) -> None:
    del file["_meta"]


def flags(file: Any) -> None:
    del file["_meta/done"]
    file["_meta/done"] = np.zeros(6)
    file["_meta/done"].attrs["__data_type__"] = "ndarray"


def no_rewards(file: Any) -> None:
    del file["_meta/rew"]


def notes(file: Any) -> None:
    file["_indices"].attrs["samplebatch"] = "{"


@pytest.mark.parametrize("change", [cut, no_cursor, wrong_cursor, no_columns, flags, no_rewards, notes])
def test_damaged_files_are_rejected(tmp_path: Path, change: Any) -> None:
    path = str(tmp_path / "buffer.hdf5")
    theirs = tianshou.ReplayBuffer(6)
    for i in range(5):
        theirs.add(step(tianshou.Batch, i, 0))
    theirs.save_hdf5(path)
    with h5py.File(path, "a") as file:
        change(file)
    with pytest.raises(FormatError):
        ReplayBuffer.load_hdf5(path)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "buffer.hdf5"
    with pytest.raises(FileNotFoundError):
        ReplayBuffer.load_hdf5(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(FormatError, match="must be an HDF5 file, got another"):
        ReplayBuffer.load_hdf5(path)
    ReplayBuffer(3).save_hdf5(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(FormatError):
        ReplayBuffer.load_hdf5(path)


def test_unsupported_values_are_reported_without_changing_the_file(tmp_path: Path) -> None:
    path = tmp_path / "buffer.hdf5"
    buffer = ReplayBuffer(4)
    buffer.add(step(Batch, 0, 0))
    buffer.save_hdf5(path)
    batch = step(Batch, 1, 0)
    batch.info.hook = lambda: None
    buffer.add(batch)
    with pytest.raises(NotImplementedError, match=r"column 'info\.hook' must have values that HDF5 can store"):
        buffer.save_hdf5(path)
    with pytest.raises(UnstorableError):
        buffer.save_hdf5(path)
    assert len(ReplayBuffer.load_hdf5(path)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["buffer.hdf5"]
