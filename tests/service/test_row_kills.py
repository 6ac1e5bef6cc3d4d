"""Writers and consumers of a row table are killed: no acknowledged row is lost or consumed twice."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from samplebatch.errors import LimitTimeoutError
from samplebatch.service import ReplayServer, RowClient, RowTable
from tests.service import row_processes

COLUMNS = ["ids", "text", "reward"]
CONTEXT = multiprocessing.get_context("forkserver")
# Processes are forked from one that has imported the package: 64 imports would take a minute on two cores.
CONTEXT.set_forkserver_preload([row_processes.__name__])


def start(role: Callable[[str, int, str], None], uri: str, number: int, folder: Path) -> BaseProcess:
    """Start a writer or a consumer that logs its keys to a separate file."""
    process = CONTEXT.Process(target=role, args=(uri, number, str(folder / f"{role.__name__}-{number}")))
    process.start()
    return process


def read_keys(folder: Path, role: str) -> np.ndarray:
    """Return the keys that processes of a role have logged."""
    logs = [path.read_bytes() for path in sorted(folder.glob(f"{role}-*"))]
    return np.concatenate([np.frombuffer(log[: len(log) // 8 * 8], np.int64) for log in logs])


def wait_until(check: Callable[[], bool], seconds: float, message: str) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


@pytest.mark.parametrize(("writers", "killed"), [(4, 2), pytest.param(64, 48, marks=pytest.mark.long)])
def test_killed_writers_and_consumers_lose_and_duplicate_no_row(writers: int, killed: int, tmp_path: Path) -> None:
    """Kill running writers and a consumer; compare acknowledged with taken keys."""
    folder, keys_before_kill = tmp_path, 40
    table = RowTable("rows", 512, ragged={"ids": "int64"})
    with ReplayServer([table]) as server:
        writing = [start(row_processes.write, server.uri, number, folder) for number in range(writers)]
        consuming = [start(row_processes.consume, server.uri, number, folder) for number in range(3)]
        logs = [folder / f"write-{number}" for number in range(writers)]

        def have_all_written() -> bool:
            assert all(process.is_alive() for process in (*writing, *consuming)), "a process has printed its error"
            return all(log.exists() and log.stat().st_size >= 8 * keys_before_kill for log in logs)

        try:
            wait_until(have_all_written, 60 + 5 * writers, "every writer must have written")
            for process in (*writing[:killed], consuming[0]):
                process.kill()
            survivors = writing[killed:]
            sizes = [log.stat().st_size for log in logs[killed:]]
            wait_until(
                lambda: all(log.stat().st_size > size for log, size in zip(logs[killed:], sizes, strict=True)),
                60 + writers,
                "writers that live must go on",
            )
            for process in survivors:
                process.kill()
            for process in writing:
                process.join()
                assert process.exitcode == -signal.SIGKILL
            acknowledged = read_keys(folder, "write")
            wait_until(
                lambda: table.info()["size"] == 0 or not _is_any_complete(table), 60, "complete rows must be taken"
            )
            time.sleep(0.5)
        finally:
            for process in (*writing, *consuming):
                process.kill()
                process.join()
    selected = read_keys(folder, "consume")
    assert len(acknowledged) >= writers * keys_before_kill
    assert len(np.unique(selected)) == len(selected), "a row was taken twice"
    lost = np.setdiff1d(acknowledged, selected)
    # A consumer that was killed may have taken rows that it had no time to log.
    unlogged = table.info()["sampled"] - len(selected)
    assert len(lost) <= unlogged <= 16, f"{len(lost)} acknowledged rows were lost"


def _is_any_complete(table: RowTable) -> bool:
    try:
        table.wait(1, columns=COLUMNS, timeout_s=0)
    except LimitTimeoutError:
        return False
    return True


def serve(folder: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    """Start a service with a table of rows as a command; return its process and its address."""
    table = "rows=rows:100,ragged=ids:int64"
    command = [sys.executable, "-m", "samplebatch.cli", "serve", "-t", table, "-p", str(port)]
    process = subprocess.Popen([*command, "--checkpoint", str(folder)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "grpc" in line:
            return process, line.split()[-1]
    raise AssertionError(f"the service must start, it ended with {process.wait()}")


def test_rows_survive_a_service_that_is_killed_and_restored(tmp_path):
    """Rows of a checkpoint are restored after SIGKILL, and an open client continues with the restored service."""
    process, uri = serve(tmp_path / "service")
    try:
        with RowClient(uri, "rows", timeout_s=10.0) as client:
            client.put([1, 2, 3], {"ids": [[1], [2, 2], [3]]})
            assert client.take(1, columns=["ids"])["key"].tolist() == [1]
            client.checkpoint()
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            process.stdout.close()
            process, _ = serve(tmp_path / "service", int(uri.rsplit(":", 1)[1]))
            client.put([4], {"ids": [[4]]})
            batch = client.take(3, columns=["ids"])
            assert batch["key"].tolist() == [2, 3, 4]
            assert batch["ids"].lengths.tolist() == [2, 1, 1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
