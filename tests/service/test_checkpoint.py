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
from samplebatch.errors import (
    ArgumentError,
    ColumnMismatchError,
    FormatError,
    SampleBatchError,
    StorageError,
    UntrustedPickleError,
)
from samplebatch.service import Checkpoints, PublishedWeights, RateLimiter, ReplayClient, ReplayServer, ReplayTable
from samplebatch.service.weights import pack_weights
from samplebatch.storage.buffers import file as buffer_file
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
    # Sampling alone removes the fragments of a fifo table that may be sampled 9 times.
    limiter = RateLimiter(2, samples_per_insert=9 if name == "fifo" else 1.5, error_buffer=1000)
    return ReplayTable(name, seed=seed, limiter=limiter, **TABLES[name])


def insert(table: ReplayTable, number: int) -> None:
    rows = episode(number, range(5), done=number % 2 == 0, image=np.full(3, number, np.uint8)[0])
    key = f"k{number % 4}" if table.kind == "key" else None
    table.extend(rows, writer="w", keys=key, timeout_s=5)


def draw(table: ReplayTable) -> Any:
    sample = table.sample(4, timeout_s=5) if table.kind != "key" else table.sample(1, key="k1", timeout_s=5)
    if table.kind == "prioritized":
        table.update_weight(sample.indices, np.arange(4) + 0.5, sample.generation)
    rows = sample.batch
    return {name: np.asarray(rows[name]).tolist() for name in rows.keys() if name not in ("info", "policy")}  # noqa: SIM118


def fill(table: ReplayTable) -> None:
    for number in range(5 if table.unit == "fragments" else 13):
        insert(table, number)
        if number > 3:
            draw(table)


@pytest.mark.parametrize("name", TABLES)
def test_a_restored_table_resumes_exactly(name: str, tmp_path: Path) -> None:
    table = make(name)
    fill(table)
    Checkpoints(tmp_path / "c").write([table])
    again = make(name, seed=99)
    assert Checkpoints(tmp_path / "c").restore([again]) == tmp_path / "c" / "checkpoint-000000001"
    assert {**again.info(), "nbytes": 0} == {**table.info(), "nbytes": 0}
    for number in range(20, 24):
        assert draw(again) == draw(table)
        if table.remover != "none":
            for item in (table, again):
                insert(item, number)
    assert again.info()["inserted"] == table.info()["inserted"]
    assert again.info()["sampled"] == table.info()["sampled"]


def test_all_tables_are_restored(tmp_path: Path) -> None:
    tables = [make(name) for name in TABLES]
    for table in tables:
        fill(table)
    Checkpoints(tmp_path).write(tables)
    again = [make(name, seed=1) for name in TABLES]
    Checkpoints(tmp_path).restore(again)
    assert [len(table) for table in again] == [len(table) for table in tables]


def test_fragments_of_every_form_are_restored_exactly(tmp_path: Path) -> None:
    table = ReplayTable("q", kind="fifo", capacity=9)
    rows = [
        MultiAgentBatch({"p": fragment(0, 3), 1: fragment(1, 2)}, 3),
        MultiAgentBatch({"p": fragment(2, 1)}, 1),
        MultiAgentBatch({1: SampleBatch(number=[1], infos=[{"a": 1}])}, 1),
        MultiAgentBatch({1: SampleBatch(number=[2], infos=[{"b": "x"}])}, 1),
    ]
    for item in rows[:2]:
        table.extend(item)
    with pytest.raises(ColumnMismatchError):
        table.extend(rows[2])
    table.reset()
    for item in rows[2:]:
        table.extend(item)
    Checkpoints(tmp_path).write([table])
    again = ReplayTable("q", kind="fifo", capacity=9)
    Checkpoints(tmp_path).restore([again])
    assert again.state_dict()["fragments"] == rows[2:]


def test_a_fragment_that_is_in_a_checkpoint_is_not_inserted_again(tmp_path: Path) -> None:
    table = make("prioritized")
    for number in (1, 2):
        table.extend(episode(number, range(3)), writer="w", stream="s", number=number)
    Checkpoints(tmp_path).write([table])
    again = make("prioritized")
    Checkpoints(tmp_path).restore([again])
    assert (again.taken("w", "s"), again.taken("w")) == (2, 0)
    sent_again = [
        again.extend(episode(number, range(3)), writer="w", stream="s", number=number).inserted for number in (2, 3)
    ]
    assert sent_again == [0, 3]
    assert len(again) == 9


@pytest.mark.parametrize("selected", [7, [["w", "s"]], [["w", "s", -1]], [["w", "s", "x"]]])
def test_invalid_fragment_numbers_are_rejected(selected: Any) -> None:
    table = make("uniform")
    with pytest.raises((FormatError, ArgumentError)):
        table.load_state_dict(table.state_dict() | {"taken": selected})


@pytest.mark.parametrize("missing", ["taken", "limiter", "max_times"])
def test_a_checkpoint_that_lacks_a_part_is_rejected(missing: str, tmp_path: Path) -> None:
    table = make("uniform")
    fill(table)
    path = Checkpoints(tmp_path).write([table]).path / "tables.json"
    reported = json.loads(path.read_bytes())
    # As an older version wrote it: without this part, and without a checksum.
    del reported["checksum"], reported["tables"]["uniform"]["state"][missing]
    path.write_text(json.dumps(reported))
    with pytest.raises(FormatError, match=f"the state of a table must be intact.*'{missing}'"):
        Checkpoints(tmp_path).restore([make("uniform")])


def _change_state(folder: Path, kind: str, **parts: Any) -> None:
    """Write a checkpoint, and put other parts into the manifest's state of its table; None leaves a part out."""
    table = make(kind)
    fill(table)
    path = Checkpoints(folder).write([table]).path / "tables.json"
    reported = json.loads(path.read_bytes())
    del reported["checksum"]
    (about,) = reported["tables"].values()
    for name, value in parts.items():
        about["state"][name] = value
        if value is None:
            del about["state"][name]
    path.write_text(json.dumps(reported))


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
def test_a_checkpoint_that_does_not_list_its_files_is_rejected(
    kind: str, parts: dict[str, Any], tmp_path: Path
) -> None:
    _change_state(tmp_path, kind, **parts)
    with pytest.raises(FormatError, match="must be intact, got damaged data"):
        Checkpoints(tmp_path).restore([make(kind)])


def test_files_of_a_checkpoint_are_in_its_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere.arrow"
    _change_state(folder, "uniform", buffer=str(elsewhere))
    next(folder.glob("*/0.arrow")).rename(elsewhere)
    with pytest.raises(FormatError, match="must be in its folder"):
        Checkpoints(folder).restore([make("uniform")])


def test_a_checkpoint_that_does_not_describe_its_tables_is_rejected(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).write([make("uniform")]).path / "tables.json"
    reported = json.loads(path.read_bytes())
    del reported["checksum"], reported["tables"]["uniform"]["remover"]
    path.write_text(json.dumps(reported))
    with pytest.raises(FormatError, match="must declare the remover of table 'uniform', got none"):
        Checkpoints(tmp_path).restore([make("uniform")])


# While threads insert


@pytest.mark.parametrize(
    "options", [{}, {"kind": "prioritized"}, {"streams": 3}, {"compress": ["obs", "obs_next"]}], ids=str
)
def test_a_checkpoint_is_consistent_while_rows_are_overwritten(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is written in small parts; rows of the table are overwritten between the parts."""
    monkeypatch.setattr(buffer_file, "_LIVE_PART_NBYTES", 500)
    table = ReplayTable("t", capacity=60, seed=2, **options)
    for number in range(10):
        table.extend(episode(number, range(7), info=number), writer=f"w{number % 3}")
    expected = table.state_dict()["buffer"]
    reads = buffer_file._RowsBefore.read
    numbers = iter(range(100, 10_000))

    def read_and_insert(self: Any, position: int, slots: Any) -> Any:
        actual = reads(self, position, slots)
        for _ in range(next(numbers) % 4):
            number = next(numbers)
            table.extend(episode(number, range(number % 7 + 1)), writer=f"w{number % 5}")
        return actual

    monkeypatch.setattr(buffer_file._RowsBefore, "read", read_and_insert)
    Checkpoints(tmp_path).write([table])
    monkeypatch.undo()
    assert next(numbers) > 200
    again = ReplayTable("t", capacity=60, seed=3, **options)
    Checkpoints(tmp_path).restore([again])
    result = again.state_dict()["buffer"]
    for item in (result, expected):
        del item["checksums"]
    assert_equal(result, expected)


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert sorted(actual) == sorted(expected)
        for name in expected:
            assert_equal(actual[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for first, other in zip(actual, expected, strict=True):
            assert_equal(first, other)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected)
    elif hasattr(expected, "equals"):
        assert actual.equals(expected)
    else:
        assert actual == expected


def test_a_table_continues_without_copies_once_it_is_written(tmp_path: Path) -> None:
    table = make("uniform")
    fill(table)
    Checkpoints(tmp_path).write([table])
    items: Any = table._items
    assert items.buffer._table.journal is None


def test_a_table_continues_without_copies_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make("uniform")
    fill(table)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write([table])

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(buffer_file, "arrow_writer", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write([table])
    items: Any = table._items
    assert items.buffer._table.journal is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000000001", "lock"]


def test_writers_are_blocked_for_at_most_one_part(tmp_path: Path) -> None:
    """An insert during a checkpoint of 200 MB waits for a fraction of the checkpoint's duration."""
    table = ReplayTable("t", capacity=200_000, seed=0)
    obs = np.zeros((2000, 128), np.float64)
    flags = np.zeros(2000, bool)
    rows = SampleBatch(obs=obs, actions=np.zeros(2000), rewards=np.zeros(2000), terminateds=flags, truncateds=flags)
    for _ in range(100):
        table.extend(rows)
    longest, stop = [0.0], threading.Event()

    def insert() -> None:
        while not stop.is_set():
            started = time.perf_counter()
            table.extend(rows[:16])
            longest[0] = max(longest[0], time.perf_counter() - started)

    thread = threading.Thread(target=insert, daemon=True)
    thread.start()
    try:
        seconds = Checkpoints(tmp_path).write([table]).seconds
    finally:
        stop.set()
        thread.join(30)
    assert longest[0] < max(0.3 * seconds, 0.1), (longest, seconds)


# Folders


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints, table = Checkpoints(tmp_path, keep=2), make("fifo")
    for number in range(4):
        insert(table, number)
        checkpoints.write([table])
    assert [path.name for path in checkpoints.paths()] == ["checkpoint-000000003", "checkpoint-000000004"]
    assert len(list(tmp_path.iterdir())) == 3
    again = make("fifo")
    checkpoints.restore([again])
    assert len(again) == 4


def test_without_a_checkpoint_nothing_is_restored(tmp_path: Path) -> None:
    table = make("fifo")
    assert Checkpoints(tmp_path / "new").restore([table]) is None
    assert len(table) == 0


def test_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-00ff").mkdir()
    (tmp_path / ".checkpoint-00ff" / "0.arrow").write_bytes(b"half")
    checkpoints, table = Checkpoints(tmp_path), make("fifo")
    assert checkpoints.restore([table]) is None
    checkpoints.write([table])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000000001", "lock"]


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


def test_a_writer_that_is_killed_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    for kills in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        assert child.stdout is not None
        done = -1
        started = None
        for line in child.stdout:
            done = int(line)
            started = started or time.monotonic()
            if time.monotonic() - started > 0.05 * (kills + 1):
                child.send_signal(signal.SIGKILL)
        child.wait(30)
        child.stdout.close()
        table = make("uniform")
        Checkpoints(tmp_path).restore([table])
        assert table.info()["inserted"] >= 5 * (done + 1)


HOLDER = """
import os, sys, time
from samplebatch.service import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
receiver, sender = os.pipe()
child = os.fork()
if child:
    os.read(receiver, 1)
    print(os.getpid(), child, flush=True)
else:
    os.write(sender, b"1")  # the child has closed its copy of the lock
time.sleep(600)
"""


def test_a_folder_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    """The lock is released when its owner ends, even if a forked child of the owner still runs."""
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert owner.stdout is not None
    pid, child = map(int, owner.stdout.readline().split())
    try:
        with pytest.raises(StorageError) as refused:
            Checkpoints(tmp_path)
        expected = f"'{tmp_path}' must be used by one service at a time, and process {pid} has it open"
        assert str(refused.value) == expected
        os.kill(pid, signal.SIGKILL)
        owner.wait(30)
        os.kill(child, 0)
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.restore([make("uniform")]) is None
    finally:
        owner.kill()
        os.kill(child, signal.SIGKILL)
        owner.stdout.close()


def test_a_folder_is_free_once_it_is_closed(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path)
    with pytest.raises(StorageError, match="and this process has it open"):
        Checkpoints(tmp_path)
    first.write([make("uniform")])
    first.close()
    first.close()
    with pytest.raises(StorageError, match="must be open, got closed ones"):
        first.write([make("uniform")])
    (tmp_path / "lock").write_bytes(b"\xff what nobody wrote")
    with Checkpoints(tmp_path) as second:
        assert second.restore([make("uniform")]) is not None
        (tmp_path / "lock").write_bytes(b"")
        with pytest.raises(StorageError, match="and another process has it open"):
            Checkpoints(tmp_path)


FORKED = """
import os, sys
from samplebatch.errors import StorageError
from samplebatch.service import Checkpoints
from tests.service.test_checkpoint import make
checkpoints = Checkpoints(sys.argv[1])
checkpoints.write([make("fifo")])
child = os.fork()
if not child:
    try:
        checkpoints.write([make("fifo")])
    except StorageError as error:
        os._exit(7 if f"process {os.getppid()} has it open" in str(error) else 8)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(checkpoints.write([make("fifo")]).path.name)
"""


def test_a_forked_child_does_not_write_while_its_parent_does(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "checkpoint-000000002\n", done.stderr


FULL = """
import resource, signal, sys
from samplebatch.service import Checkpoints, ReplayClient, ReplayServer
from tests.service.test_checkpoint import fill, make
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
table, checkpoints = make(sys.argv[2]), Checkpoints(sys.argv[1])
fill(table)
first = checkpoints.write([table]).path
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
try:
    checkpoints.write([table])
except OSError as error:
    print(error.errno, error.filename)
with ReplayServer([table], checkpoint=lambda: checkpoints.write([table]).path) as server:
    with ReplayClient(server.uri, table.name) as client:
        try:
            client.checkpoint()
        except OSError as error:
            print(error)
assert checkpoints.paths() == [first]
"""


@pytest.mark.parametrize("name", ["uniform", "fifo"])
def test_a_checkpoint_that_does_not_fit_on_the_disk_reports_the_cause(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    at_home, at_client = done.stdout.splitlines()
    assert at_home == f"27 {tmp_path}"
    assert at_client == f"[Errno 27] a checkpoint cannot be written: File too large: '{tmp_path}'"


@pytest.mark.parametrize(
    ("failure", "reported"),
    [
        (
            OSError(28, "No space left on device", "/replay"),
            r"OSError: \[Errno 28\] No space left on device: '/replay'",
        ),
        (MemoryError("realloc of 9 bytes"), "MemoryError: realloc of 9 bytes"),
        (ArgumentError("a sentence"), "^a sentence$"),
    ],
)
def test_a_client_receives_the_reason_a_checkpoint_failed(failure: Exception, reported: str) -> None:
    def fail() -> None:
        raise failure

    with (
        ReplayServer([make("fifo")], checkpoint=fail) as server,
        ReplayClient(server.uri, "fifo") as client,
        pytest.raises(SampleBatchError, match=reported) as caught,
    ):
        client.checkpoint()
    assert isinstance(caught.value, ArgumentError if isinstance(failure, ArgumentError) else StorageError)


# Weights


def publish(published: PublishedWeights, value: float, name: str = "net") -> None:
    published.publish(pack_weights({"w": np.full(2, value)}, name))


def test_weights_and_versions_are_in_a_checkpoint(tmp_path: Path) -> None:
    published, again = PublishedWeights(), PublishedWeights()
    for number in range(50):
        publish(published, number)
    publish(published, 7.0, "other")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.write([make("uniform")], published)
        checkpoints.restore([make("uniform")], again)
    assert again.state() == published.state()
    assert again.versions() == {"net": 50, "other": 1}
    publish(again, 50)
    assert again.versions() == {"net": 51, "other": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"version": -1},
        {"version": 1 << 60},
        {"version": 1.5},
        {"version": "1"},
        {"version": None},
        {"epoch": 7},
        {"epoch": "e" * 300},
        {"name": "another"},
        {"name": None},
        {"name": ["net"]},
        {"file": "../weights-0.arrow"},
        {"file": "0.arrow"},
        {"file": None},
        {"crc32": 0},
    ],
    ids=str,
)
def test_weights_that_a_checkpoint_does_not_describe_are_rejected(changes: dict[str, Any], tmp_path: Path) -> None:
    published, again = PublishedWeights(), PublishedWeights()
    publish(published, 1.0)
    checkpoints, table = Checkpoints(tmp_path), make("uniform")
    manifest = checkpoints.write([table], published).path / "tables.json"
    plain = json.loads(manifest.read_text())
    del plain["checksum"]
    for described in (
        [plain["weights"][0] | changes],
        [{name: value for name, value in plain["weights"][0].items() if name not in changes}],
        plain["weights"] * 2,
        {"net": 1},
        7,
    ):
        manifest.write_text(json.dumps(plain | {"weights": described}))
        with pytest.raises(SampleBatchError, match="checkpoint-000000001"):
            checkpoints.restore([table], again)
        assert again.state() == {}


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("prioritized fragments", {"times": [10**30] * 5}),
    ("prioritized fragments", {"times": [-1] * 5}),
    ("prioritized fragments", {"priorities": [float("nan")] * 5}),
    ("prioritized fragments", {"priorities": [-1.0] * 5}),
    ("prioritized fragments", {"priorities": [float("inf")] * 5}),
    ("prioritized fragments", {"priorities": ["1"] * 5}),
    ("prioritized fragments", {"largest": float("nan")}),
    ("prioritized fragments", {"numbers": [4, 3, 2, 1, 0]}),
    ("prioritized fragments", {"numbers": [0, 0, 1, 2, 3]}),
    ("prioritized fragments", {"next": 2}),
    ("prioritized fragments", {"next": 10**30}),
    ("prioritized fragments", {"keys": ["a"] * 5}),
    ("by key", {"keys": ["a"] * 4}),
    ("by key", {"keys": [None] * 4}),
    ("uniform", {"max_times": 10**30}),
    ("uniform", {"max_times": -1}),
    ("uniform", {"taken": [["w", "s", 10**30]]}),
    ("uniform", {"taken": [[1, "s", 1]]}),
    ("uniform", {"streams": [["w", 0, 99]]}),
    ("uniform, limited", {"left": np.full(40, 9)}),
    ("prioritized, limited", {"max_times": 1}),
]


@pytest.mark.parametrize(("name", "changes"), IMPOSSIBLE, ids=str)
def test_values_impossible_for_a_table_are_rejected(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    table, other, control = make(name), make(name, seed=6), make(name, seed=6)
    for filled in (table, other, control):
        fill(filled)
    with pytest.raises(SampleBatchError):
        other.load_state_dict(table.state_dict() | changes)
    assert other.info() == control.info()
    for _ in range(3):
        assert draw(other) == draw(control)
    other.load_state_dict(table.state_dict())
    assert draw(other) == draw(table)


@pytest.mark.parametrize("limits", [{"inserted": -1}, {"sampled": 10**30}, {"origin": [-1, 0]}, {"min_size": 10**6}])
def test_limits_impossible_for_a_table_are_rejected(limits: dict[str, Any]) -> None:
    table = make("uniform")
    state = table.state_dict()
    with pytest.raises(SampleBatchError):
        table.load_state_dict(state | {"limiter": state["limiter"] | limits})


def test_clients_receive_new_weights_after_restarts(tmp_path: Path) -> None:
    """An actor polls while a learner publishes; the service is restarted with and without a checkpoint."""
    table, published = make("fifo"), PublishedWeights()
    with Checkpoints(tmp_path) as checkpoints:
        with ReplayServer([table], weights=published) as server:
            port = server.port
            actor = ReplayClient(server.uri, "fifo", writer="actor")
            learner = ReplayClient(server.uri, "fifo", writer="learner")
            for number in range(1, 51):
                assert learner.publish({"w": np.full(1, number)}) == number
                if number == 40:
                    checkpoints.write([table], server.weights)
            assert follow(actor, 0) == (50, 50)
        again = PublishedWeights()
        checkpoints.restore([table := make("fifo")], again)
    with ReplayServer([table], port=port, weights=again) as server, ReplayClient(server.uri, "fifo") as other:
        # The checkpoint has version 40, and the actor version 50 of the same epoch.
        assert follow(actor, 50) is None
        assert follow(other, 0) == (40, 40)
        # Another learner, which knows no version.
        assert other.publish({"w": np.full(1, 1041)}) == 41
        assert follow(actor, 50) == (41, 1041)
        assert follow(actor, 41) is None
        # The learner of before knows version 50.
        assert learner.publish({"w": np.full(1, 1051)}) == 51
        assert follow(actor, 41) == (51, 1051)
    with ReplayServer([make("fifo")], port=port) as server, ReplayClient(server.uri, "fifo") as other:
        assert follow(actor, 51) is None
        assert other.publish({"w": np.full(1, 2001)}) == 1
        assert follow(actor, 51) == (1, 2001)
        assert follow(actor, 1) is None
        # A client that was not there knows the number alone.
        with ReplayClient(server.uri, "fifo") as third:
            assert follow(third, 51) == (1, 2001)
            assert follow(third, 1) is None
    with ReplayServer([make("fifo")], port=port) as server, ReplayClient(server.uri, "fifo") as other:
        # The same number in another epoch.
        assert other.publish({"w": np.full(1, 3001)}) == 1
        assert follow(actor, 1) == (1, 3001)
        assert learner.publish({"w": np.full(1, 3052)}) == 52
        assert follow(actor, 1) == (52, 3052)
        for client in (actor, learner):
            client.close()


def follow(client: Any, newer_than: int) -> tuple[int, int] | None:
    actual = client.latest(newer_than)
    return None if actual is None else (actual.version, int(actual.value["w"][0]))


def test_damage_is_detected(tmp_path: Path) -> None:
    table, published = make("uniform"), PublishedWeights()
    publish(published, 1.0)
    fill(table)
    path = Checkpoints(tmp_path).write([table], published).path
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        with pytest.raises(FormatError, match=file.name):
            Checkpoints(tmp_path).restore([make("uniform")])
        file.write_bytes(data)


def test_a_folder_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"must be a folder of checkpoints or new, got a folder with 'notes\.txt'"):
        Checkpoints(tmp_path)
    with pytest.raises(StorageError, match="or new, got a file"):
        Checkpoints(tmp_path / "notes.txt")


def test_tables_that_differ_are_rejected(tmp_path: Path) -> None:
    table = ReplayTable("t", capacity=8)
    table.extend(episode(0, range(3)))
    Checkpoints(tmp_path).write([table])
    for other, error, message in (
        (ReplayTable("u", capacity=8), StorageError, "tables must include 't', which .* has"),
        (ReplayTable("t", capacity=9), ColumnMismatchError, "table 't' must have capacity 8, as in .* got 9"),
        (
            ReplayTable("t", capacity=8, kind="prioritized"),
            ColumnMismatchError,
            "kind 'uniform', as in .* 'prioritized'",
        ),
        (ReplayTable("t", capacity=8, stack_num=2), ColumnMismatchError, "class, ring sizes and options"),
        (ReplayTable("t", capacity=8, streams=2), ColumnMismatchError, "class, ring sizes and options"),
    ):
        with pytest.raises(error, match=message):
            Checkpoints(tmp_path).restore([other])
        assert len(other) == 0


def test_pickled_objects_are_restored_only_if_allowed(tmp_path: Path) -> None:
    def make_queue() -> ReplayTable:
        return ReplayTable("q", kind="fifo", capacity=8)

    table = make_queue()
    table.extend(SampleBatch(obs=[1, 2], infos=[{1, 2}, {3}]))
    Checkpoints(tmp_path).write([table])
    with pytest.raises(UntrustedPickleError, match="infos"):
        Checkpoints(tmp_path).restore([make_queue()])
    again = make_queue()
    Checkpoints(tmp_path, allow_pickle=True).restore([again])
    assert again.sample(1).batch["infos"].tolist() == [{1, 2}, {3}]


DECLARED = "obs:float64+new_obs:float64+actions:int64+rewards:float64+terminateds:bool+truncateds:bool"


@pytest.mark.parametrize("kind", ["uniform", "fifo"])
def test_declared_columns_are_restored_after_a_restart(kind: Any, tmp_path: Path) -> None:
    declared = DECLARED + ("+eps_id:int64+t:int64" if kind == "fifo" else "")
    table = ReplayTable("t", kind=kind, capacity=20, columns=declared)
    table.extend(episode(0, range(5)))
    Checkpoints(tmp_path).write([table])
    for again in (ReplayTable("t", kind=kind, capacity=20, columns=declared), ReplayTable("t", kind=kind, capacity=20)):
        Checkpoints(tmp_path).restore([again])
        assert again.info()["columns"] == table.info()["columns"]
        assert len(again) == len(table)
        with pytest.raises(ColumnMismatchError, match="column 'extra' must be declared"):
            again.extend(episode(1, range(5), extra=1.5))
        again.extend(episode(1, range(5)))
        copied = ReplayTable("t", kind=kind, capacity=20)
        copied.load_state_dict(again.state_dict())
        assert copied.info() == again.info()


@pytest.mark.parametrize("kind", ["uniform", "fifo"])
@pytest.mark.parametrize("columns", ["obs:float32+", "extra:float64+"])
def test_a_checkpoint_whose_rows_do_not_fit_the_declaration_is_rejected(
    kind: Any, columns: str, tmp_path: Path
) -> None:
    table = ReplayTable("t", kind=kind, capacity=20)
    table.extend(episode(0, range(5)))
    Checkpoints(tmp_path).write([table])
    declared = columns + DECLARED.removeprefix("obs:float64+" if columns.startswith("obs") else "")
    again = ReplayTable("t", kind=kind, capacity=20, columns=declared + "+eps_id:int64+t:int64")
    name = columns.partition(":")[0]
    with pytest.raises(ColumnMismatchError, match=f"column '{name}' must be"):
        Checkpoints(tmp_path).restore([again])
    assert len(again) == 0
    with pytest.raises(ColumnMismatchError, match=f"column '{name}' must be"):
        again.load_state_dict(table.state_dict())
    assert len(again) == 0


@pytest.mark.parametrize(
    "columns", [3, [["p", 3]], [[None, [["obs", "flot"]]]], [["p", [["obs", "int64"]]]], [[{}, []]]]
)
def test_damaged_declarations_of_a_checkpoint_are_rejected(columns: Any, tmp_path: Path) -> None:
    table = make("uniform")
    insert(table, 0)
    Checkpoints(tmp_path).write([table])
    _change_state(tmp_path, "uniform", columns=columns)
    again = make("uniform")
    with pytest.raises(FormatError):
        Checkpoints(tmp_path).restore([again])
    assert again.info()["columns"] is None
