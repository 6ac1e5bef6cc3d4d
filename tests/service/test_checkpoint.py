"""Checkpoints of tables: exact, atomic, and written while threads insert."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.errors import ArgumentError, ColumnMismatchError, FormatError, StorageError, UntrustedPickleError
from samplebatch.service import Checkpoints, RateLimiter, ReplayTable
from samplebatch.storage import live_buffer
from tests.service.table_rows import episode, fragment

TABLES: dict[str, dict[str, Any]] = {
    "uniform": {"capacity": 40},
    "uniform, limited": {"capacity": 40, "max_times_sampled": 3, "streams": 2},
    "prioritized": {"capacity": 40, "kind": "prioritized"},
    "prioritized, limited": {"capacity": 40, "kind": "prioritized", "max_times_sampled": 2},
    "without next observations": {"capacity": 40, "ignore_obs_next": True, "stack_num": 3},
    "compressed": {"capacity": 40, "compress": True},
    "fifo": {"capacity": 6, "kind": "fifo", "max_times_sampled": 9},
    "uniform fragments": {"capacity": 6, "items": "fragments", "remover": "most_sampled"},
    "prioritized fragments": {"capacity": 6, "kind": "prioritized", "items": "fragments", "remover": "uniform"},
    "by key": {"capacity": 6, "kind": "key", "remover": "lifo"},
}


def make(name: str, seed: int = 5) -> ReplayTable:
    limiter = RateLimiter(2, samples_per_insert=1.5, error_buffer=1000)
    return ReplayTable(name, seed=seed, limiter=limiter, **TABLES[name])


def insert(table: ReplayTable, number: int) -> None:
    rows = episode(number, range(5), done=number % 2 == 0, image=np.full(3, number, np.uint8)[0])
    key = f"k{number % 4}" if table.kind == "key" else None
    table.insert(rows, writer="w", keys=key, timeout=5)


def draw(table: ReplayTable) -> Any:
    sample = table.sample(4, timeout=5) if table.kind != "key" else table.sample(1, key="k1", timeout=5)
    if table.kind == "prioritized":
        table.update_weight(sample.indices, np.arange(4) + 0.5, sample.generations)
    rows = sample.batch
    return {name: np.asarray(rows[name]).tolist() for name in rows.keys() if name not in ("info", "policy")}  # noqa: SIM118


def fill(table: ReplayTable) -> None:
    for number in range(5 if table.unit == "fragments" else 13):
        insert(table, number)
        if number > 3:
            draw(table)


@pytest.mark.parametrize("name", TABLES)
def test_a_restored_table_carries_on_exactly(name: str, tmp_path: Path) -> None:
    table = make(name)
    fill(table)
    Checkpoints(tmp_path / "c").write([table])
    again = make(name, seed=99)
    assert Checkpoints(tmp_path / "c").restore([again]) == tmp_path / "c" / "checkpoint-000000001"
    assert {**again.info(), "nbytes": 0} == {**table.info(), "nbytes": 0}
    for number in range(20, 24):
        assert draw(again) == draw(table)
        if table.remover != "none":
            for one in (table, again):
                insert(one, number)
    assert again.info()["inserted"] == table.info()["inserted"]
    assert again.info()["sampled"] == table.info()["sampled"]


def test_all_tables_come_back(tmp_path: Path) -> None:
    tables = [make(name) for name in TABLES]
    for table in tables:
        fill(table)
    Checkpoints(tmp_path).write(tables)
    again = [make(name, seed=1) for name in TABLES]
    Checkpoints(tmp_path).restore(again)
    assert [len(table) for table in again] == [len(table) for table in tables]


def test_fragments_of_every_form_come_back_as_they_were(tmp_path: Path) -> None:
    table = ReplayTable("q", kind="fifo", capacity=9)
    rows = [
        MultiAgentBatch({"p": fragment(0, 3), 1: fragment(1, 2)}, 3),
        MultiAgentBatch({"p": fragment(2, 1)}, 1),
        MultiAgentBatch({1: SampleBatch(number=[1], infos=[{"a": 1}])}, 1),
        MultiAgentBatch({1: SampleBatch(number=[2], infos=[{"b": "x"}])}, 1),
    ]
    for one in rows[:2]:
        table.insert(one)
    with pytest.raises(ColumnMismatchError):
        table.insert(rows[2])
    table.reset()
    for one in rows[2:]:
        table.insert(one)
    Checkpoints(tmp_path).write([table])
    again = ReplayTable("q", kind="fifo", capacity=9)
    Checkpoints(tmp_path).restore([again])
    assert again.state_dict()["fragments"] == rows[2:]


def test_a_fragment_that_is_in_a_checkpoint_is_not_taken_again(tmp_path: Path) -> None:
    table = make("prioritized")
    for number in (1, 2):
        table.insert(episode(number, range(3)), writer="w", stream="s", number=number)
    Checkpoints(tmp_path).write([table])
    again = make("prioritized")
    Checkpoints(tmp_path).restore([again])
    assert (again.taken("w", "s"), again.taken("w")) == (2, 0)
    sent_again = [
        again.insert(episode(number, range(3)), writer="w", stream="s", number=number).inserted for number in (2, 3)
    ]
    assert sent_again == [0, 3]
    assert len(again) == 9


@pytest.mark.parametrize("taken", [7, [["w", "s"]], [["w", "s", -1]], [["w", "s", "x"]]])
def test_numbers_of_fragments_that_are_none_are_refused(taken: Any) -> None:
    table = make("uniform")
    with pytest.raises((FormatError, ArgumentError)):
        table.load_state_dict(table.state_dict() | {"taken": taken})


@pytest.mark.parametrize("missing", ["taken", "limiter", "max_times"])
def test_a_checkpoint_that_lacks_a_part_is_refused(missing: str, tmp_path: Path) -> None:
    table = make("uniform")
    fill(table)
    path = Checkpoints(tmp_path).write([table]).path / "tables.json"
    told = json.loads(path.read_bytes())
    # As an older version wrote it: without this part, and without a checksum.
    del told["checksum"], told["tables"]["uniform"]["state"][missing]
    path.write_text(json.dumps(told))
    with pytest.raises(FormatError, match=f"the state of a table must be whole.*'{missing}'"):
        Checkpoints(tmp_path).restore([make("uniform")])


def _change_state(folder: Path, kind: str, **parts: Any) -> None:
    """Write a checkpoint, and put other parts into the manifest's state of its table; None leaves a part out."""
    table = make(kind)
    fill(table)
    path = Checkpoints(folder).write([table]).path / "tables.json"
    told = json.loads(path.read_bytes())
    del told["checksum"]
    (about,) = told["tables"].values()
    for name, value in parts.items():
        about["state"][name] = value
        if value is None:
            del about["state"][name]
    path.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("uniform", {"buffer": None}),
        ("uniform", {"left": None}),
        ("uniform", {"buffer": 7}),
        ("fifo", {"fragments": {"files": []}}),
        ("fifo", {"fragments": {"files": [3], "about": [], "places": []}}),
        ("fifo", {"fragments": {"files": [], "about": [], "places": [[0, 0]]}}),
    ],
)
def test_a_checkpoint_that_does_not_name_its_files_is_refused(kind: str, parts: dict[str, Any], tmp_path: Path) -> None:
    _change_state(tmp_path, kind, **parts)
    with pytest.raises(FormatError, match="must be whole, and it is damaged"):
        Checkpoints(tmp_path).restore([make(kind)])


def test_files_of_a_checkpoint_lie_in_its_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere.arrow"
    _change_state(folder, "uniform", buffer=str(elsewhere))
    next(folder.glob("*/0.arrow")).rename(elsewhere)
    with pytest.raises(FormatError, match="must lie in its folder"):
        Checkpoints(folder).restore([make("uniform")])


def test_a_checkpoint_that_does_not_describe_its_tables_is_refused(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).write([make("uniform")]).path / "tables.json"
    told = json.loads(path.read_bytes())
    del told["checksum"], told["tables"]["uniform"]["remover"]
    path.write_text(json.dumps(told))
    with pytest.raises(FormatError, match="must tell the remover of table 'uniform', it does not"):
        Checkpoints(tmp_path).restore([make("uniform")])


# While threads insert


@pytest.mark.parametrize(
    "options", [{}, {"kind": "prioritized"}, {"streams": 3}, {"compress": ["obs", "obs_next"]}], ids=str
)
def test_rows_are_those_of_one_moment_however_many_are_written_over(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a few rows, between each of which the whole table is written over, or some of it."""
    monkeypatch.setattr(live_buffer, "_PART_NBYTES", 500)
    table = ReplayTable("t", capacity=60, seed=2, **options)
    for number in range(10):
        table.insert(episode(number, range(7), info=number), writer=f"w{number % 3}")
    expected = table.state_dict()["buffer"]
    reads = live_buffer._RowsBefore.read
    numbers = iter(range(100, 10_000))

    def read_and_insert(self: Any, place: int, slots: Any) -> Any:
        found = reads(self, place, slots)
        for _ in range(next(numbers) % 4):
            number = next(numbers)
            table.insert(episode(number, range(number % 7 + 1)), writer=f"w{number % 5}")
        return found

    monkeypatch.setattr(live_buffer._RowsBefore, "read", read_and_insert)
    Checkpoints(tmp_path).write([table])
    monkeypatch.undo()
    assert next(numbers) > 200
    again = ReplayTable("t", capacity=60, seed=3, **options)
    Checkpoints(tmp_path).restore([again])
    found = again.state_dict()["buffer"]
    for one in (found, expected):
        del one["checksums"]
    assert_equal(found, expected)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert sorted(found) == sorted(expected)
        for name in expected:
            assert_equal(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    elif hasattr(expected, "equals"):
        assert found.equals(expected)
    else:
        assert found == expected


def test_a_table_goes_on_without_copies_once_it_is_written(tmp_path: Path) -> None:
    table = make("uniform")
    fill(table)
    Checkpoints(tmp_path).write([table])
    items: Any = table._items
    assert items.buffer._table.journal is None


def test_a_table_goes_on_without_copies_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make("uniform")
    fill(table)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write([table])

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live_buffer, "arrow_writer", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write([table])
    items: Any = table._items
    assert items.buffer._table.journal is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000001"]


def test_writers_wait_no_longer_than_a_part_takes(tmp_path: Path) -> None:
    """An insert while 200 MB are written waits a fraction of the time of the checkpoint."""
    table = ReplayTable("t", capacity=200_000, seed=0)
    obs = np.zeros((2000, 128), np.float64)
    flags = np.zeros(2000, bool)
    rows = SampleBatch(obs=obs, actions=np.zeros(2000), rewards=np.zeros(2000), terminateds=flags, truncateds=flags)
    for _ in range(100):
        table.insert(rows)
    longest, stop = [0.0], threading.Event()

    def insert() -> None:
        while not stop.is_set():
            begun = time.perf_counter()
            table.insert(rows[:16])
            longest[0] = max(longest[0], time.perf_counter() - begun)

    thread = threading.Thread(target=insert, daemon=True)
    thread.start()
    try:
        seconds = Checkpoints(tmp_path).write([table]).seconds
    finally:
        stop.set()
        thread.join(30)
    assert longest[0] < max(0.3 * seconds, 0.1), (longest, seconds)


# Folders


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints, table = Checkpoints(tmp_path, keep=2), make("fifo")
    for number in range(4):
        insert(table, number)
        checkpoints.write([table])
    assert [path.name for path in checkpoints.paths()] == ["checkpoint-000000003", "checkpoint-000000004"]
    assert len(list(tmp_path.iterdir())) == 2
    again = make("fifo")
    checkpoints.restore([again])
    assert len(again) == 4


def test_without_a_checkpoint_nothing_is_restored(tmp_path: Path) -> None:
    table = make("fifo")
    assert Checkpoints(tmp_path / "new").restore([table]) is None
    assert len(table) == 0


def test_what_a_writer_that_was_killed_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-00ff").mkdir()
    (tmp_path / ".checkpoint-00ff" / "0.arrow").write_bytes(b"half")
    checkpoints, table = Checkpoints(tmp_path), make("fifo")
    assert checkpoints.restore([table]) is None
    checkpoints.write([table])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000001"]


CHILD = """
import sys
from samplebatch.service import Checkpoints
from tests.service.test_checkpoint import insert, make
table, checkpoints = make("uniform"), Checkpoints(sys.argv[1])
for number in range(10**9):
    insert(table, number)
    checkpoints.write([table])
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    for kills in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        assert child.stdout is not None
        done = -1
        begun = None
        for line in child.stdout:
            done = int(line)
            begun = begun or time.monotonic()
            if time.monotonic() - begun > 0.05 * (kills + 1):
                child.send_signal(signal.SIGKILL)
        child.wait(30)
        child.stdout.close()
        table = make("uniform")
        Checkpoints(tmp_path).restore([table])
        assert table.info()["inserted"] >= 5 * (done + 1)


def test_damage_is_found(tmp_path: Path) -> None:
    table = make("uniform")
    fill(table)
    path = Checkpoints(tmp_path).write([table]).path
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        middle = len(whole) // 2
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(FormatError, match=file.name):
            Checkpoints(tmp_path).restore([make("uniform")])
        file.write_bytes(whole)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"must be a folder of checkpoints or a new one, it has 'notes\.txt'"):
        Checkpoints(tmp_path)
    with pytest.raises(StorageError, match="it is a file"):
        Checkpoints(tmp_path / "notes.txt")


def test_tables_that_are_others_are_refused(tmp_path: Path) -> None:
    table = ReplayTable("t", capacity=8)
    table.insert(episode(0, range(3)))
    Checkpoints(tmp_path).write([table])
    for other, error, message in (
        (ReplayTable("u", capacity=8), StorageError, "has a table 't', which would be lost"),
        (ReplayTable("t", capacity=9), ColumnMismatchError, "table 't' must have capacity 8, as in .* got 9"),
        (
            ReplayTable("t", capacity=8, kind="prioritized"),
            ColumnMismatchError,
            "kind 'uniform', as in .* 'prioritized'",
        ),
        (ReplayTable("t", capacity=8, stack_num=2), ColumnMismatchError, "class, sizes and options"),
        (ReplayTable("t", capacity=8, streams=2), ColumnMismatchError, "class, sizes and options"),
    ):
        with pytest.raises(error, match=message):
            Checkpoints(tmp_path).restore([other])
        assert len(other) == 0


def test_pickled_objects_are_restored_only_if_that_is_allowed(tmp_path: Path) -> None:
    def make_queue() -> ReplayTable:
        return ReplayTable("q", kind="fifo", capacity=8)

    table = make_queue()
    table.insert(SampleBatch(obs=[1, 2], infos=[{1, 2}, {3}]))
    Checkpoints(tmp_path).write([table])
    with pytest.raises(UntrustedPickleError, match="infos"):
        Checkpoints(tmp_path).restore([make_queue()])
    again = make_queue()
    Checkpoints(tmp_path, allow_pickle=True).restore([again])
    assert again.sample(1).batch["infos"].tolist() == [{1, 2}, {3}]
