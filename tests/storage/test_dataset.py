"""Datasets with one writer and many readers, in order or shuffled, intact after processes are killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from samplebatch import (
    Batch,
    Dataset,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    concat_samples,
    load,
    verify,
)
from samplebatch.column.ragged import RaggedColumn
from samplebatch.errors import (
    ArgumentError,
    ColumnMismatchError,
    ColumnNotFoundError,
    EmptyBufferError,
    FormatError,
    PolicyNotFoundError,
    StorageError,
    UntrustedPickleError,
)
from samplebatch.storage.datasets import commit_log
from samplebatch.storage.datasets.commit_log import LOG
from samplebatch.storage.tables.parquet import parquet_writer
from tests.optional import torch
from tests.storage.parts import append_some


def steps(start: int, n: int, *, episode: int = 10) -> SampleBatch:
    t = np.arange(start, start + n)
    return SampleBatch(
        t=t % episode,
        eps_id=t // episode,
        obs={"image": np.repeat(t, 4).astype("f4").reshape(n, 2, 2), "id": t},
        terminateds=t % episode == episode - 1,
        infos=[{"at": int(i)} for i in t],
    )


def filled(folder: Path, sizes: Any = (7, 13, 1, 20), **options: Any) -> Dataset:
    dataset, start = Dataset(folder), 0
    for n in sizes:
        dataset.extend(steps(start, n))
        start += n
    return Dataset(folder, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return filled(tmp_path_factory.mktemp("whole") / "steps")


def ids(batch: Any) -> list[int]:
    return [int(i) for i in batch["obs"]["id"]] if isinstance(batch, Batch) else batch["obs.id"].tolist()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(0, 40), max_size=30)
    | st.permutations(range(41))
    | st.tuples(st.integers(0, 40), st.integers(0, 41)).map(lambda ends: list(range(*ends)))
)
def test_rows_of_all_parts_are_read_in_any_layout(whole: Dataset, rows: list[int]) -> None:
    assert whole.take(rows) == steps(0, 41).take(rows)


# Appending


def fragment(i: int) -> MultiAgentBatch:
    rows = SampleBatch(t=[2 * i, 2 * i + 1], obs=np.full((2, 3), i, np.float32), infos=[{}, {"at": i}])
    return MultiAgentBatch({"a": rows, "b": rows[:1]} if i % 2 else {"a": rows}, 2)


def test_fragments_are_restored_in_order_one_by_one_or_joined(tmp_path: Path) -> None:
    fragments = [fragment(i) for i in range(12)]
    for half in (fragments[:7], fragments[7:]):
        dataset = Dataset(tmp_path / "steps")
        for part in half:
            dataset.extend(part)
    again = Dataset(tmp_path / "steps")
    assert list(again.fragments()) == fragments
    assert again.read() == concat_samples(fragments)
    assert load(tmp_path / "steps") == concat_samples(fragments)
    assert (len(again), repr(again)) == (30, f"Dataset('{tmp_path}/steps': 30 rows in 12 parts)")


def test_nested_batches_remain_nested(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    for i in range(3):
        dataset.extend(Batch(obs={"x": np.arange(4) + 4 * i}, rew=np.ones(4)))
    assert type(dataset.read()) is Batch
    batch, rows = dataset.sample(5)
    assert np.array_equal(batch.obs.x, rows)


def test_a_batch_is_saved_to_a_new_folder(tmp_path: Path) -> None:
    steps(0, 5).save(tmp_path / "steps")
    assert load(tmp_path / "steps") == steps(0, 5)
    assert ids(load(tmp_path / "steps", columns=["obs"], filters=[("t", ">", 2)])) == [3, 4]
    with pytest.raises(StorageError, match="extend"):
        steps(0, 5).save(tmp_path / "steps")


def test_incompatible_batches_are_rejected_with_the_column_name(tmp_path: Path) -> None:
    dataset = filled(tmp_path)
    batch = steps(0, 3)
    wrong: list[tuple[Any, str]] = [
        (batch.select("t", "obs"), "'eps_id' must exist"),
        (SampleBatch({**dict(batch.items()), "x": [1, 2, 3]}), "no column 'x'"),
        (SampleBatch({**dict(batch.items()), "t": [1.0, 2.0, 3.0]}), "column 't' must be int64"),
        (batch.as_multi_agent(), "must be of type SampleBatch"),
    ]
    for other, words in wrong:
        with pytest.raises(ColumnMismatchError, match=words):
            dataset.extend(other)
    dataset.extend(SampleBatch({**dict(batch.items()), "infos": [{"at": 1, "more": "x"}] * 3}))
    assert len(Dataset(tmp_path)) == 44
    assert len(dataset.parts()) == len([name for name in os.listdir(tmp_path) if name.startswith("part")]) == 5


def test_several_processes_append_to_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append_some, args=(tmp_path, writer)) for writer in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    joined = Dataset(tmp_path).read()
    for who in range(2):
        assert joined["i"][joined["who"] == who].tolist() == list(range(5))


def test_readers_keep_their_snapshot_until_they_refresh(tmp_path: Path) -> None:
    reader = filled(tmp_path)
    writer = Dataset(tmp_path)
    writer.extend(steps(41, 4))
    assert (len(reader), len(writer)) == (41, 45)
    assert ids(reader.read()) == list(range(41))
    assert len(reader.refresh()) == 45


# Rows


def test_rows_are_read_by_number(tmp_path: Path) -> None:
    dataset = filled(tmp_path)
    rows = [40, 3, 3, 20, 0, 7]
    assert ids(dataset.take(rows)) == rows
    assert dataset.take(rows) == steps(0, 41).take(rows)
    assert ids(dataset.take([])) == []
    with pytest.raises(ArgumentError, match="41"):
        dataset.take([41])
    assert dataset.schema.names == steps(0, 1).to_arrow().schema.names


def test_columns_and_rows_are_selected(tmp_path: Path) -> None:
    dataset = filled(tmp_path, columns=["obs.id", "t"], filters=[("t", ">=", 8)])
    expected = [i for i in range(41) if i % 10 >= 8]
    assert ids(dataset.read()) == expected
    assert dataset.read().column_names == ("t", "obs.id")
    assert [i for batch in dataset.iter_batches(3) for i in ids(batch)] == expected
    assert sorted(i for batch in dataset.iter_batches(3, shuffle=True) for i in ids(batch)) == expected
    assert set(ids(dataset.sample(50)[0])) <= set(expected)
    with pytest.raises(ColumnNotFoundError):
        Dataset(tmp_path, columns=["x"]).read()


def test_rows_of_several_policies_are_read_of_one(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    for i in range(6):
        dataset.extend(fragment(i))
    ours = Dataset(tmp_path, policy="b")
    assert len(ours) == 3
    assert ours.read()["t"].tolist() == [2, 6, 10]
    for use in (lambda: dataset.sample(3), lambda: next(iter(dataset.iter_batches(2)))):
        with pytest.raises(ArgumentError, match="'a', 'b'"):
            use()
    with pytest.raises(PolicyNotFoundError, match="'c'"):
        len(Dataset(tmp_path, policy="c"))
    filtered = Dataset(tmp_path, filters=[("t", ">", 8)]).read()
    assert {policy: part["t"].tolist() for policy, part in filtered.items()} == {"a": [9, 10, 11], "b": [10]}


def test_samples_depend_on_the_seed_and_cover_all_rows(tmp_path: Path) -> None:
    filled(tmp_path)
    batch, rows = Dataset(tmp_path, seed=3).sample(400)
    assert ids(batch) == rows.tolist()
    assert set(rows.tolist()) == set(range(41))
    assert np.array_equal(Dataset(tmp_path, seed=3).sample(400)[1], rows)
    with pytest.raises(EmptyBufferError):
        Dataset(tmp_path / "new").sample(1)


def test_samples_are_tensors_in_the_requested_dtype(tmp_path: Path) -> None:
    flat = Dataset(tmp_path / "flat")
    flat.extend(SampleBatch(rewards=np.arange(8.0), t=np.arange(8)))
    batch, rows = flat.sample(5, device="cpu", floats="float32")
    assert (batch["rewards"].dtype, batch["t"].dtype) == (torch.float32, torch.int64)
    assert batch["t"].tolist() == rows.tolist()
    nested = Dataset(tmp_path / "nested")
    nested.extend(Batch(rew=np.arange(8.0)))
    assert nested.sample(5, floats="float32")[0].rew.dtype == np.float32
    with pytest.raises(ArgumentError, match="floats"):
        flat.sample(5, floats="int64")


def test_batches_and_sequences_are_tensors_in_the_requested_dtype(tmp_path: Path) -> None:
    flat = Dataset(tmp_path / "flat")
    flat.extend(SampleBatch(rewards=np.arange(8.0), eps_id=[0] * 8, t=np.arange(8)))
    how: Any = {"device": "cpu", "floats": "float32"}
    batches = flat.iter_batches(3, **how)
    parts = [next(iter(batches)), *flat.iter_batches(3, **how)]
    assert [part["t"].tolist() for part in parts] == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [6, 7]]
    assert {part["rewards"].dtype for part in parts} == {torch.float32}
    remaining = flat.iter_batches(3, **how)
    remaining.load_state_dict(batches.state_dict())
    assert [part["t"].tolist() for part in remaining.share(0, 1)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [part["t"].tolist() for part in remaining] == [[3, 4, 5], [6, 7]]
    sequences, rows = flat.sample_sequences(2, 4, **how)
    assert (sequences["rewards"].dtype, sequences["seq_lens"].tolist()) == (torch.float32, [4, 4])
    assert sequences["t"].tolist() == rows.reshape(-1).tolist()
    nested = Dataset(tmp_path / "nested")
    nested.extend(Batch(rew=np.arange(8.0)))
    assert nested.sample_sequences(2, 4, **how)[0].rew.shape == (2, 4)
    assert {part.rew.dtype for part in nested.iter_batches(3, floats="float32")} == {np.dtype(np.float32)}
    for ask in (flat.iter_batches, lambda n, **how: flat.sample_sequences(n, 2, **how)):
        with pytest.raises(ArgumentError, match="floats"):
            ask(3, floats="int64")


# Batches


@pytest.mark.parametrize("memory", [1 << 28, 3000])
@pytest.mark.parametrize("size", [1, 4, 41, 50])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_have_each_row_once(tmp_path: Path, shuffle: bool, size: int, memory: int) -> None:
    dataset = filled(tmp_path)
    batches = dataset.iter_batches(size, shuffle=shuffle, memory_nbytes=memory)
    actual = [ids(batch) for batch in batches]
    flat = [i for batch in actual for i in batch]
    assert sorted(flat) == list(range(41))
    assert shuffle == (flat != list(range(41)))
    assert [len(batch) for batch in actual[:-1]] == [size] * (len(actual) - 1)
    assert len(actual) == len(batches) == -(-41 // size)
    full = dataset.iter_batches(size, shuffle=shuffle, memory_nbytes=memory, drop_last=True)
    assert [len(batch) for batch in full] == [size] * (41 // size)


def test_the_order_depends_on_seed_and_epoch(tmp_path: Path) -> None:
    dataset = filled(tmp_path)

    def order(**options: Any) -> list[int]:
        return [i for batch in dataset.iter_batches(4, shuffle=True, memory_nbytes=6000, **options) for i in ids(batch)]

    assert order(seed=1) == order(seed=1)
    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize("shuffle", [False, True])
def test_iteration_continues_in_mid_epoch(tmp_path: Path, shuffle: bool) -> None:
    dataset = filled(tmp_path)
    options: dict[str, Any] = {"shuffle": shuffle, "memory_nbytes": 5000, "seed": 2}
    expected = [ids(batch) for batch in dataset.iter_batches(4, **options)]
    for stop in range(len(expected)):
        batches = dataset.iter_batches(4, **options)
        iterator = iter(batches)
        started = [ids(next(iterator)) for _ in range(stop)]
        again = Dataset(tmp_path).iter_batches(4, **options)
        again.load_state_dict(batches.state_dict())
        assert started + [ids(batch) for batch in again] == expected
    with pytest.raises(ColumnMismatchError, match="seed"):
        dataset.iter_batches(4, **{**options, "seed": 3}).load_state_dict(batches.state_dict())


def test_memory_limits_the_rows_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samplebatch.storage.tables.parquet._GROUP_NBYTES", 1 << 16)
    dataset = Dataset(tmp_path)
    for i in range(4):
        dataset.extend(SampleBatch(obs=np.full((1000, 64), i, "f4"), t=np.arange(1000)))
    dataset = Dataset(tmp_path, cache_nbytes=0)
    maximum: list[int] = []
    take = dataset._rows.take
    monkeypatch.setattr(dataset._rows, "take", lambda rows: maximum.append(len(rows)) or take(rows))
    memory = 1 << 17
    assert sum(len(batch) for batch in dataset.iter_batches(50, shuffle=True, memory_nbytes=memory)) == 4000
    assert max(maximum) * dataset._rows.row_nbytes <= memory
    assert len(set(dataset.iter_batches(50, shuffle=True, memory_nbytes=memory)._windows[0][:, 0] // 1000)) > 1


@pytest.mark.parametrize("shares", [1, 2, 5])
def test_shards_contain_each_row_once(tmp_path: Path, shares: int) -> None:
    dataset = filled(tmp_path)
    actual = [
        [i for batch in dataset.iter_batches(4, shuffle=True, shard=(share, shares)) for i in ids(batch)]
        for share in range(shares)
    ]
    assert sorted(i for share in actual for i in share) == list(range(41))
    assert all(actual)
    with pytest.raises(ArgumentError, match="shard"):
        dataset.iter_batches(4, shard=(shares, shares))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # on one core
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_data_loader_read_separate_shards(tmp_path: Path, workers: int) -> None:
    from torch.utils.data import DataLoader

    dataset = Dataset(tmp_path)
    dataset.extend(Batch(t=np.arange(30)))
    dataset.extend(Batch(t=np.arange(30, 64)))
    batches = dataset.iter_batches(5, shuffle=True, seed=1).as_torch()
    loader: Any = DataLoader(
        batches, batch_size=None, num_workers=workers, multiprocessing_context="spawn" if workers else None
    )
    actual = [batch.t.tolist() for batch in loader]
    assert sorted(t for batch in actual for t in batch) == list(range(64))
    assert [len(t) for t in actual].count(5) >= 12


# Episodes


def test_episodes_are_assembled_from_fragments(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    full = steps(0, 40)
    for rows in (np.r_[0:5, 10:13], np.r_[13:20, 5:8], np.r_[20:40], np.r_[8:10]):
        dataset.extend(full.take(rows))
    assert dataset.episodes == 4
    assert [ids(episode) for episode in dataset.iter_episodes()] == [list(range(i, i + 10)) for i in (0, 10, 20, 30)]


def test_episodes_without_ids_end_with_flags(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    for start in (0, 12):
        dataset.extend(steps(start, 12).select("obs", "terminateds"))
    assert [len(episode) for episode in dataset.iter_episodes()] == [10, 10, 4]


def test_sequences_are_within_episodes(tmp_path: Path) -> None:
    dataset = filled(tmp_path)
    batch, rows = dataset.sample_sequences(300, 4)
    assert rows.shape == (300, 4)
    assert batch["seq_lens"].tolist() == [4] * 300
    assert ids(batch) == rows.reshape(-1).tolist()
    assert (np.diff(rows, axis=1) == 1).all()
    assert (rows // 10 == rows[:, :1] // 10).all()
    assert {int(row) for row in rows[:, 0]} == {i for i in range(41) if i % 10 <= 6 and i < 40}
    with pytest.raises(EmptyBufferError, match="11"):
        dataset.sample_sequences(1, 11)


# Killed writers, missing files


WRITER = """
import sys
import numpy as np
from samplebatch import Dataset, SampleBatch
dataset = Dataset(sys.argv[1])
i = len(dataset.parts())
print(*dataset.dropped, flush=True)
while True:
    dataset.extend(SampleBatch(a=np.full(5_000, i), b=np.full(5_000, i)))
    i += 1
    print(i, flush=True)
    if sys.argv[2:] and i % 5 == 0:
        dataset.compact(10_000_000)
        i = len(dataset.parts())
"""


@pytest.mark.parametrize("compact", [False, True])
def test_killed_writers_lose_no_committed_rows(tmp_path: Path, compact: bool) -> None:
    rng = np.random.default_rng(0)
    rows = 0
    for _ in range(int(os.environ.get("SAMPLEBATCH_KILLS", "6"))):
        command = [sys.executable, "-c", WRITER, str(tmp_path), *["compact"] * compact]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        done = 0
        for _ in range(int(rng.integers(1, 8))):
            done += bool(writer.stdout.readline())
        time.sleep(rng.random() / 50)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        done += len(writer.stdout.read().split())
        writer.stdout.close()
        dataset = Dataset(tmp_path)
        batch = dataset.read()
        assert len(batch) == len(dataset) >= rows + 5000 * done
        assert (batch["a"] == batch["b"]).all()
        assert (batch["a"].reshape(-1, 5000) == batch["a"][::5000, None]).all()
        rows = len(batch)
    Dataset(tmp_path).extend(SampleBatch(a=np.zeros(1, int), b=np.zeros(1, int)))
    left = [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    assert not left
    assert len(Dataset(tmp_path)) == rows + 1
    assert counts_by_tool(tmp_path) == dict.fromkeys(TOOLS, rows + 1)


def test_the_next_writer_reports_which_parts_it_dropped(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "part-000009-00000000.parquet").write_bytes(b"whole, but not committed")
    (tmp_path / ".part-000004-00000000.parquet.00ff.tmp").write_bytes(b"begun")
    # Renamed by a writer that was killed before it hid the rows.
    (tmp_path / "_dropped-7-part-000008-00000000.parquet").write_bytes(b"renamed")
    with open(tmp_path / LOG, "ab") as log:
        log.write(b"0123abcd {")
    dataset = Dataset(tmp_path)
    assert ids(dataset.read()) == list(range(41))
    dataset.extend(steps(41, 2))
    assert [sentence.split()[0] for sentence in dataset.dropped if "bytes" not in sentence] == [
        ".part-000004-00000000.parquet.00ff.tmp",
        "part-000009-00000000.parquet",
    ]
    assert ["bytes of a commit" in sentence for sentence in dataset.dropped] == [True, False, False]
    assert ids(Dataset(tmp_path).read()) == list(range(43))
    (dropped,) = tmp_path.glob("_dropped-24-part-000009-00000000.parquet")
    assert dropped.read_bytes().startswith(b"whole, but not committed")
    assert counts_by_tool(tmp_path) == dict.fromkeys(TOOLS, 43)


def test_a_missing_or_truncated_part_is_detected(tmp_path: Path) -> None:
    dataset = filled(tmp_path)
    first, *_, last = dataset.parts()
    data = last.read_bytes()
    last.write_bytes(data[:-1])
    with pytest.raises(FormatError, match=r"must have the committed \d+ bytes, got \d+ bytes"):
        Dataset(tmp_path)
    last.unlink()
    with pytest.raises(FormatError, match=f"'{last.name}' .* got no file"):
        Dataset(tmp_path)
    assert [bool(report.fault) for report in verify(tmp_path)] == [False, False, False, False, True]
    last.write_bytes(data)
    first.write_bytes(last.read_bytes())
    with pytest.raises(FormatError):
        Dataset(tmp_path)


def test_a_log_that_has_changed_is_rejected(tmp_path: Path) -> None:
    filled(tmp_path)
    log = tmp_path / LOG
    data = log.read_bytes()
    lines = data.rindex(b"}\n") + 2
    for at in range(0, lines, 37):
        log.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(FormatError, match=LOG):
            Dataset(tmp_path)
    # The end of the last line and its newline too: the seal says that the line was written.
    for at in (*range(lines - 12, lines), *range(4)):
        for flip in (1, 0x80):
            log.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            with pytest.raises(FormatError, match=LOG):
                Dataset(tmp_path)
    # A line that was damaged after the writer of the next one was killed.
    second = data.index(b"\n") + 1
    log.write_bytes(data[:second] + b"0" * 8 + data[second + 8 : lines])
    with pytest.raises(FormatError, match="line 2"):
        Dataset(tmp_path)
    log.unlink()
    with pytest.raises(FormatError, match=r"without '_commits\.parquet'"):
        Dataset(tmp_path)


def test_a_log_whose_footer_has_changed_is_reported_read_and_repaired(tmp_path: Path) -> None:
    filled(tmp_path)
    log = tmp_path / LOG
    data = log.read_bytes()
    for at in range(data.rindex(b"}\n") + 2, len(data), 97):
        log.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert [report.path.name for report in verify(tmp_path) if report.fault] == [LOG]
        assert ids(Dataset(tmp_path).read()) == list(range(41))
    assert Dataset(tmp_path).compact(1) == 0
    assert log.read_bytes() == data


def test_a_log_truncated_within_a_commit_opens_before_or_after_it(tmp_path: Path) -> None:
    filled(tmp_path)
    log = tmp_path / LOG
    before = log.read_bytes()
    Dataset(tmp_path).extend(steps(41, 2))
    after = log.read_bytes()
    first = next(i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    line = after.rindex(b"}\n") + 2
    for at in range(first, len(after), 61):
        # A write that ends early leaves the bytes of the footer that it was to replace.
        for torn in (after[:at] + before[at:], after[:at], after[:at] + bytes(len(after) - at)):
            log.write_bytes(torn)
            assert len(Dataset(tmp_path)) == (43 if at >= line else 41)
    # Whole lines, and the commit that was interrupted before its seal: nothing is lost.
    for whole_lines in (after[:line], after[:line] + b"--------" + after[line + 8 :]):
        log.write_bytes(whole_lines)
        assert [report.path.name for report in verify(tmp_path) if report.fault] == [LOG]
        dataset = Dataset(tmp_path)
        assert dataset.compact(1) == 0
        assert len(dataset) == 43
        assert log.read_bytes() == after
    assert dataset.dropped == ()
    log.write_bytes(after[: line - 10] + before[line - 10 :])
    dataset = Dataset(tmp_path)
    dataset.extend(steps(41, 3))
    assert "bytes of a commit" in dataset.dropped[0]
    assert ids(Dataset(tmp_path).read()) == list(range(44))
    assert counts_by_tool(tmp_path) == dict.fromkeys(TOOLS, 44)


def test_a_folder_with_an_incomplete_first_commit_counts_as_new(tmp_path: Path) -> None:
    filled(tmp_path / "whole", [3])
    data = (tmp_path / "whole" / LOG).read_bytes()
    for at in (0, 1, 4, 5, 100, data.index(b"\n")):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / LOG).write_bytes(data[:at])
        assert len(Dataset(folder)) == 0
        Dataset(folder).extend(steps(0, 2))
        assert ids(Dataset(folder).read()) == [0, 1]
        assert pl.scan_parquet(folder).collect().height == 2


def test_a_commit_on_a_full_disk_does_not_change_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = filled(tmp_path)
    data = (tmp_path / LOG).read_bytes()
    write, calls = os.pwritev, []

    def full(fd: int, parts: Any, at: int) -> int:
        calls.append(at)
        if len(calls) == 1:
            return write(fd, [parts[0][:50]], at)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "disk full")
        return write(fd, parts, at)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="disk full"):
        dataset.extend(steps(41, 2))
    monkeypatch.undo()
    assert len(calls) == 3
    assert (tmp_path / LOG).read_bytes() == data
    dataset.extend(steps(41, 2))
    assert ids(Dataset(tmp_path).read()) == list(range(43))


@pytest.mark.parametrize("refused", ["open", "link"])
def test_parts_are_written_without_anonymous_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    call = getattr(os, refused)

    def refuse(path: Any, flags: Any, *args: Any, **kwargs: Any) -> Any:
        if refused == "link" or flags & os.O_TMPFILE == os.O_TMPFILE:
            raise PermissionError(errno.EPERM, "not permitted", path)
        return call(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, refused, refuse)
    filled(tmp_path)
    dataset = filled(tmp_path / "compacted", [3, 3])
    dataset.compact()
    (path,) = dataset.parts()
    load(path).save(path)
    assert not list(tmp_path.rglob("*.tmp"))
    assert ids(Dataset(tmp_path).read()) == list(range(41))
    assert ids(load(path)) == list(range(6))


def test_other_tools_read_the_folder_while_a_part_is_written(tmp_path: Path) -> None:
    filled(tmp_path)
    with parquet_writer(tmp_path / "part-000004-00000000.parquet", pa.schema([("t", pa.int64())])) as writer:
        writer.write_table(pa.table({"t": [1, 2]}))
        assert counts_by_tool(tmp_path) == dict.fromkeys(TOOLS, 41)


# Format version 1


VERSION_1 = Path(__file__).parent / "dataset_version_1"


def test_a_folder_of_version_1_is_read_and_upgraded_by_the_next_writer(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    shutil.copytree(VERSION_1, folder)
    before = Dataset(folder)
    assert before.read()["t"].tolist() == load(folder)["t"].tolist() == list(range(6))
    assert not any(report.fault for report in verify(folder))
    assert not (folder / LOG).exists()
    (folder / ".part-000009-00000000.parquet.dropped").write_bytes((folder / before.parts()[0].name).read_bytes())
    with open(folder / "_commits", "ab") as log:
        log.write(b"0123abcd {")
    writer = Dataset(folder)
    writer.extend(SampleBatch(t=[6], obs=np.zeros((1, 2), np.float32), infos=[{"at": 6}]))
    assert writer.dropped == ("10 bytes of a commit were written incompletely",)
    assert not (folder / "_commits").exists()
    assert not list(folder.glob("*.dropped"))
    assert before.read()["t"].tolist() == list(range(6))
    assert before.refresh().read()["t"].tolist() == list(range(7))
    assert not any(report.fault for report in verify(folder))
    assert counts_by_tool(folder) == dict.fromkeys(TOOLS, 7)


def test_an_upgrade_that_was_interrupted_is_completed(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    shutil.copytree(VERSION_1, folder)
    Dataset(folder).compact(1)
    upgraded = (folder / LOG).read_bytes()
    (folder / LOG).rename(folder / "_commits")
    assert len(Dataset(folder)) == 6
    assert not any(report.fault for report in verify(folder))
    Dataset(folder).compact(1)
    assert (folder / LOG).read_bytes() == upgraded
    (folder / "_commits").touch()
    with pytest.raises(FormatError, match="must have one log"):
        Dataset(folder)


def test_pickles_need_permission(tmp_path: Path) -> None:
    Dataset(tmp_path).extend(SampleBatch(infos=[{"x": {1}}]))
    with pytest.raises(UntrustedPickleError, match="'infos'"):
        Dataset(tmp_path).read()
    assert list(Dataset(tmp_path, allow_pickle=True).read()["infos"]) == [{"x": {1}}]


def test_a_file_is_rejected_as_a_dataset_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="must be a folder"):
        Dataset(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="missing"):
        Dataset(tmp_path / "missing" / "x").extend(steps(0, 1))
    assert len(Dataset(tmp_path / "new")) == 0


WHILE = """
import sys
import numpy as np
from samplebatch import Dataset, SampleBatch
dataset = Dataset(sys.argv[1])
for i in range(40):
    dataset.extend(SampleBatch(a=np.full(500, i), b=np.full(500, i)))
    if i % 8 == 7:
        dataset.compact()
"""


def test_readers_see_complete_fragments_while_another_process_writes_and_joins(tmp_path: Path) -> None:
    Dataset(tmp_path).extend(SampleBatch(a=np.full(500, -1), b=np.full(500, -1)))
    writer = subprocess.Popen([sys.executable, "-c", WHILE, str(tmp_path)])
    dataset, observed = Dataset(tmp_path, cache_nbytes=0), set()
    while writer.poll() is None or len(dataset.refresh()) < 20_500:
        batch = dataset.refresh().take(np.random.default_rng(0).permutation(len(dataset)))
        assert (batch["a"] == batch["b"]).all()
        assert np.bincount(batch["a"] + 1).tolist() == [500] * (len(batch) // 500)
        observed.add(len(batch))
    assert writer.wait() == 0
    assert len(observed) > 1


# Compaction


def test_compaction_joins_small_parts_without_losing_rows(tmp_path: Path) -> None:
    dataset = filled(tmp_path, [3] * 20)
    reader = Dataset(tmp_path, cache_nbytes=0)
    iterator = iter(reader.iter_batches(7, memory_nbytes=1000))
    started = [ids(next(iterator))]
    assert dataset.compact(2000) > 10
    assert len(dataset.parts()) < 10
    assert ids(dataset.read()) == list(range(60))
    assert [i for batch in [*started, *map(ids, iterator)] for i in batch] == list(range(60))
    assert ids(reader.take([59, 0])) == [59, 0]
    assert dataset.compact(1 << 30) == len(dataset.parts()) + 0 or len(dataset.parts()) == 1
    assert ids(Dataset(tmp_path).read()) == list(range(60))
    assert dataset.compact() == 0


def test_a_reader_keeps_its_snapshot_during_compaction(tmp_path: Path) -> None:
    reader = filled(tmp_path, [5, 5], cache_nbytes=0)
    writer = Dataset(tmp_path)
    writer.extend(steps(10, 5))
    assert writer.compact() == 2
    assert ids(reader.take([9, 0])) == [9, 0]
    assert len(reader) == 10
    assert [i for batch in reader.iter_batches(4) for i in ids(batch)] == list(range(10))
    assert len(reader.refresh()) == 15


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("filters", [None, [("t", ">=", 2)]])
def test_every_read_method_works_after_compaction(tmp_path: Path, filters: Any, looked: bool) -> None:
    filled(tmp_path, [5, 5])
    ways: list[Any] = [len, Dataset.read, lambda reader: reader.read(verify=True), lambda reader: reader.schema.names]
    ways += [lambda reader: list(reader.iter_batches(4)), lambda reader: reader.episodes]
    readers = [Dataset(tmp_path, filters=filters, cache_nbytes=0) for _ in ways]
    expected = [way(reader) for way, reader in zip(ways, readers, strict=True)]
    if not looked:
        readers = [Dataset(tmp_path, filters=filters, cache_nbytes=0) for _ in ways]
    for reader in readers:
        reader._rows._open.clear()
    writer = Dataset(tmp_path)
    writer.extend(steps(10, 5))
    assert writer.compact() == 2
    assert [way(reader) for way, reader in zip(ways, readers, strict=True)] == expected


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("filters", [None, [("x", ">=", 11)]])
def test_rows_of_a_policy_are_preserved_by_compaction(tmp_path: Path, filters: Any, looked: bool) -> None:
    writer = Dataset(tmp_path)

    def append(start: int) -> None:
        parts = {"a": SampleBatch(x=[start, start + 1]), "b": SampleBatch(x=[-start, -start - 1, -start - 2])}
        writer.extend(MultiAgentBatch(parts, 3))

    append(10)
    append(20)
    reader = Dataset(tmp_path, policy="a", filters=filters, cache_nbytes=0)
    expected = [10, 11, 20, 21] if filters is None else [11, 20, 21]
    assert not looked or len(reader) == len(expected)
    append(30)
    writer.compact()
    assert np.asarray(reader.read()["x"]).tolist() == expected
    append(40)
    writer.compact()
    assert len(reader) == len(expected)
    assert np.asarray(reader.read()["x"]).tolist() == expected
    assert np.asarray(reader.refresh().read()["x"]).tolist() == [*expected, 30, 31, 40, 41]


# Other tools


def count_in_datasets(folder: Path, **options: Any) -> int:
    import datasets

    with tempfile.TemporaryDirectory() as cache:
        return len(datasets.load_dataset(**options, split="train", cache_dir=cache))


TOOLS: dict[str, Callable[[Path], int]] = {
    "polars": lambda folder: pl.scan_parquet(folder).collect().height,
    "polars read": lambda folder: pl.read_parquet(folder).height,
    "polars glob": lambda folder: pl.scan_parquet(folder / "*.parquet").collect().height,
    "pandas": lambda folder: len(pd.read_parquet(folder)),
    "pyarrow": lambda folder: pyarrow.dataset.dataset(folder, format="parquet").count_rows(),
    "pyarrow table": lambda folder: parquet.read_table(folder).num_rows,
    "duckdb": lambda folder: len(duckdb.sql(f"from read_parquet('{folder}')").fetchall()),
    "duckdb glob": lambda folder: len(duckdb.sql(f"from '{folder}/*.parquet'").fetchall()),
    "datasets": lambda folder: count_in_datasets(folder, path=str(folder)),
    "datasets data_dir": lambda folder: count_in_datasets(folder, path="parquet", data_dir=str(folder)),
    "datasets data_files": lambda folder: count_in_datasets(folder, path="parquet", data_files=f"{folder}/*.parquet"),
}

if find_spec("datasets") is None:
    TOOLS = {tool: count for tool, count in TOOLS.items() if not tool.startswith("datasets")}


def counts_by_tool(folder: Path) -> dict[str, int]:
    return {tool: count(folder) for tool, count in TOOLS.items()}


@pytest.mark.parametrize("tool", TOOLS)
def test_other_tools_read_the_committed_rows_of_the_folder(tmp_path: Path, tool: str) -> None:
    folder = tmp_path / "steps"
    dataset = filled(folder)
    assert TOOLS[tool](folder) == 41
    dataset.compact(1000)
    assert TOOLS[tool](folder) == 41


def test_other_tools_read_the_values_and_types_of_the_parts(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    dataset = filled(folder)
    scanned = pl.scan_parquet(folder)
    assert scanned.collect().equals(pl.scan_parquet(dataset.parts()).collect())
    assert scanned.collect_schema() == pl.scan_parquet(folder / "part-*.parquet").collect_schema()
    assert scanned.filter(pl.col("terminateds")).collect().height == 4
    assert scanned.collect()["obs.id"].to_list() == list(range(41))
    assert duckdb.sql(f"select count(*) from '{folder}/*.parquet' where terminateds").fetchall() == [(4,)]


COLUMNS: dict[str, Any] = {
    "flags": np.ones((3, 2), bool),
    "images": np.zeros((3, 2, 4, 1), np.uint8),
    "half": np.zeros((3, 2), np.float16),
    "objects": [{"a": {1: 2}}, {}, {"b": None}],
    "text": np.array(["a", "bc", ""]),
    "empty": np.zeros((3, 0), np.float32),
    "times": np.zeros(3, "M8[s]"),
    "ragged": RaggedColumn.from_rows([np.zeros(2), np.zeros(1), np.zeros(0)]),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_other_tools_read_columns_of_every_kind(tmp_path: Path, column: str) -> None:
    for _ in range(2):
        Dataset(tmp_path).extend(SampleBatch(x=COLUMNS[column], t=np.arange(3)))
    for tool in ("polars", "polars glob", "pandas", "pyarrow", "duckdb glob"):
        assert TOOLS[tool](tmp_path) == 6, tool


def test_polars_reads_a_folder_while_another_process_appends(tmp_path: Path) -> None:
    Dataset(tmp_path).extend(SampleBatch(a=np.full(5_000, 0), b=np.full(5_000, 0)))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        writer.stdout.readline()
        counts = []
        for _ in range(20):
            appended = int(writer.stdout.readline())
            try:
                counts.append(pl.scan_parquet(tmp_path).select(pl.len()).collect().item())
            except pl.exceptions.ComputeError as error:
                # Polars read the log's size before an append, its end after it: see docs/guarantees-in-detail.md.
                if "must end with PAR1" not in str(error):
                    raise
                counts.append(pl.scan_parquet(tmp_path).select(pl.len()).collect().item())
            assert counts[-1] >= appended * 5_000
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert counts == sorted(counts)
    assert not any(count % 5_000 for count in counts)


def test_buffers_are_filled_with_complete_episodes(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    full = steps(0, 40)
    flat = SampleBatch(
        obs=full["obs.id"],
        actions=full["t"],
        rewards=full["t"] * 1.0,
        terminateds=full["terminateds"],
        eps_id=full["eps_id"],
        t=full["t"],
    )
    for rows in (np.r_[0:5, 10:13], np.r_[13:20, 5:8], np.r_[20:40], np.r_[8:10]):
        dataset.extend(flat.take(rows))
    buffer = ReplayBuffer(100)
    assert len(buffer.extend(dataset)) == 40
    assert buffer.obs[:40].tolist() == list(range(40))
    assert not buffer.truncated[:40].any()


def test_buffers_of_several_agents_are_filled_with_fragments(tmp_path: Path) -> None:
    def rows(start: int) -> SampleBatch:
        return SampleBatch(
            obs=np.arange(3) + start, actions=np.zeros(3), rewards=np.ones(3), terminateds=np.zeros(3, bool)
        )

    dataset = Dataset(tmp_path)
    for start in (0, 3):
        dataset.extend(MultiAgentBatch({"wolf": rows(start), "sheep": rows(start)}, 3))
    buffer = MultiAgentReplayBuffer(10)
    assert buffer.extend(dataset) == 12
    assert buffer.buffers["wolf"].obs[:6].tolist() == list(range(6))


def test_rows_of_one_shape_are_appended_to_a_ragged_column(tmp_path: Path) -> None:
    for kind in (SampleBatch, Batch):
        dataset = Dataset(tmp_path / kind.__name__)
        for rows in ([[1], [2, 3]], np.array([[4, 5], [6, 7]]), [[], []]):
            batch = SampleBatch(ids=rows)
            dataset.extend(batch if kind is SampleBatch else batch.as_batch())
        column = dataset.read()["ids"]
        assert column.kind == "ragged"
        assert [row.tolist() for row in column] == [[1], [2, 3], [4, 5], [6, 7], [], []]
        batch = SampleBatch(ids=[[0.5]])
        with pytest.raises(ColumnMismatchError, match="column 'ids' must be large_list<item: int64>"):
            dataset.extend(batch if kind is SampleBatch else batch.as_batch())


def test_ragged_rows_after_rows_of_one_shape_are_rejected_with_a_fix(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path / "rows")
    dataset.extend(SampleBatch(ids=[[1, 2]]))
    with pytest.raises(ColumnMismatchError, match=r"'ids' must be .* as in the dataset, .*declare it ragged in every"):
        dataset.extend(SampleBatch(ids=[[1], [2, 3]]))


def test_errors_quote_only_the_start_of_names_in_a_log() -> None:
    part = {"name": "x/" * 100_000, "size": 1, "nbytes": 1, "groups": [1], "policies": None}
    with pytest.raises(ValueError, match="a part must have a name without folders") as raised:
        commit_log._part(part)
    assert len(str(raised.value)) < 200
