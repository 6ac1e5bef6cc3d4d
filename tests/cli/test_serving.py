"""`samplebatch serve` and `samplebatch top`, run as people run them: in processes of their own, with a real Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from typer.testing import CliRunner

from samplebatch import SampleBatch
from samplebatch.cli import application
from samplebatch.cli.serving import _write as write_checkpoint
from samplebatch.cli.serving import draw_tables
from samplebatch.cli.terminal import Interruption
from samplebatch.errors import ArgumentError, ColumnMismatchError, LimitTimeoutError, SampleBatchError
from samplebatch.service import (
    Checkpoints,
    MetricsServer,
    RateLimiter,
    ReplayClient,
    ReplayTable,
    checkpoint,
)
from samplebatch.service.checkpoint import write_state
from samplebatch.service.server import render_metrics
from tests.service.table_rows import episode, fragment

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


class Process:
    """Command with methods that wait for a line of its output."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-u", "-m", "samplebatch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
        )
        self.lines: list[str] = []
        self._read = threading.Condition()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._read:
                self.lines.append(line.rstrip("\n"))
                self._read.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches a pattern; return the match."""
        deadline = time.monotonic() + WAIT_S
        with self._read:
            while True:
                for line in self.lines:
                    if match := re.search(pattern, line):
                        return match
                assert time.monotonic() < deadline, f"no line matches {pattern!r}: {self.lines[-12:]}"
                assert self.popen.poll() is None or self._thread.is_alive(), self.lines
                self._read.wait(0.2)

    def end(self, number: int = signal.SIGINT) -> int:
        """Send a signal; return the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            status = self.popen.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            # What its threads wait for is in the output then.
            self.popen.send_signal(signal.SIGABRT)
            self._thread.join(WAIT_S)
            pytest.fail("\n".join(["it did not end", *self.lines]))
        self._thread.join(WAIT_S)
        return status


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[Process, str]]:
    """Serve in a process; yield the process and its address."""
    process = Process("serve", *arguments)
    try:
        yield process, process.wait_for(r"Serving .* at (grpc\S+)")[1]
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.end()
        assert process.popen.stdout is not None
        process.popen.stdout.close()


def run(*arguments: str) -> tuple[int, str]:
    actual = subprocess.run(
        [sys.executable, "-m", "samplebatch", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "COLUMNS": "300", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    return actual.returncode, actual.stdout + actual.stderr


def test_tables_resume_from_the_checkpoint_that_ctrl_c_writes(tmp_path: Path) -> None:
    options = ("--table", "replay=uniform:100,seed=1", "--table", "q=queue:8", "--checkpoint", str(tmp_path / "c"))
    with serving(*options) as (process, uri):
        with ReplayClient(uri, "replay") as buffer, ReplayClient(uri, "q") as queue:
            buffer.extend(episode(0, range(9)))
            queue.extend(fragment(7))
        assert process.end() == 130
        assert "Wrote 9 steps of 'replay', 1 fragments of 'q' " in process.lines[-1]
    with serving(*options) as (process, uri):
        assert process.lines[0].startswith("Restored 9 steps of 'replay', 1 fragments of 'q' from ")
        with ReplayClient(uri, "replay") as buffer, ReplayClient(uri, "q") as queue:
            assert len(buffer) == 9
            assert next(iter(queue.stream()))["number"].tolist() == [7, 7]
        assert process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("moment", range(1, 13))
def test_a_signal_at_any_moment_ends_the_wait(moment: int) -> None:
    lines = 0

    def trace(*_: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines == moment:
            signal.raise_signal(signal.SIGTERM)
        return trace

    began, tracer = time.monotonic(), sys.gettrace()
    with Interruption() as interruption:
        sys.settrace(trace)
        try:
            assert interruption.wait(WAIT_S)
        finally:
            sys.settrace(tracer)
    assert lines > moment
    assert time.monotonic() - began < WAIT_S / 2


def test_checkpoints_are_written_while_serving_and_survive_a_kill(tmp_path: Path) -> None:
    options = ("-t", "replay=uniform:100", "--checkpoint", str(tmp_path), "--checkpoint-every", "1")
    with serving(*options) as (process, uri):
        with ReplayClient(uri, "replay") as buffer:
            buffer.extend(episode(0, range(9)))
            process.wait_for(r"Wrote 9 steps of 'replay'")
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
    with serving(*options) as (_, uri), ReplayClient(uri, "replay") as buffer:
        assert len(buffer) == 9


def test_declared_columns_apply_to_every_writer(tmp_path: Path) -> None:
    table = "q=queue:9,columns=number:int64"
    for name in (table, "q=queue:9"):
        # The second service has the declaration from the checkpoint.
        with serving("-t", name, "--checkpoint", str(tmp_path)) as (process, uri):
            with pytest.raises(ColumnMismatchError, match="'number' must be int64"), ReplayClient(uri, "q") as stranger:
                stranger.extend(SampleBatch(number=[0.5]))
            with ReplayClient(uri, "q") as writer:
                writer.extend(fragment(3))
            status, output = run("top", uri, "--once")
            assert status == 0
            assert "q: columns number:int64" in output
            assert process.end(signal.SIGTERM) == 0


def test_two_services_do_not_share_a_folder_of_checkpoints(tmp_path: Path) -> None:
    options = ("-t", "replay=uniform:100", "--checkpoint", str(tmp_path))
    with serving(*options) as (process, _):
        status, output = run("serve", *options)
        assert status == 2
        assert f"must be used by one service at a time, and process {process.popen.pid} has it open" in output
        assert str(tmp_path) in output
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
    with serving(*options) as (process, _):
        (tmp_path / "lock").unlink()
        tmp_path.rename(tmp_path.with_name("moved"))
        assert process.end() == 1
        assert "Error: no checkpoint was written: " in process.lines[-1]


@pytest.mark.parametrize("kind", ["uniform", "fifo"])
def test_the_description_of_a_checkpoint_is_exact_during_writes(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, again = (ReplayTable("replay", kind=kind, capacity=99) for _ in range(2))
    table.extend(episode(0, range(9)))

    def write_while_others_insert(*arguments: Any) -> Any:
        table.extend(episode(1, range(5)))
        return write_state(*arguments)

    monkeypatch.setattr(checkpoint, "write_state", write_while_others_insert)
    checkpoints = Checkpoints(tmp_path / "c")
    write_checkpoint(checkpoints, [table])
    checkpoints.restore([again])
    assert f"Wrote {len(again)} {again.unit} of 'replay'" in capsys.readouterr().out
    assert len(again) < len(table)


def test_a_client_can_request_a_checkpoint(tmp_path: Path) -> None:
    with (
        serving("-t", "replay=uniform:9", "--checkpoint", str(tmp_path)) as (_, uri),
        ReplayClient(uri, "replay") as buffer,
    ):
        assert buffer.checkpoint() == [str(tmp_path / "checkpoint-000000001")]


def test_clients_must_have_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    with serving("-t", "replay=uniform:9", "--token-file", str(tmp_path / "token")) as (_, uri):
        with ReplayClient(uri, "replay", token="secret") as buffer:
            assert len(buffer) == 0
        with ReplayClient(uri, "replay", reconnect_s=0.1) as buffer, pytest.raises(SampleBatchError):
            len(buffer)
        assert "replay" in run("top", uri, "--once", "--interval", "0.1", "--token-file", str(tmp_path / "token"))[1]


@pytest.mark.parametrize(("host", "is_told"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
def test_a_reachable_service_without_a_token_prints_a_warning(host: str, is_told: bool, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    for token, expected in (((), is_told), (("--token-file", str(tmp_path / "token")), False)):
        with serving("-t", "replay=uniform:9", "--host", host, *token) as (process, _):
            assert process.end() == 130
        assert any("may read and write" in line for line in process.lines) == expected


def test_tls_is_used(tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*make.split(), *names], check=True, capture_output=True)
    with serving("-t", "replay=uniform:9", "--tls-cert", certificate, "--tls-key", key) as (_, uri):
        assert uri.startswith("grpc+tls://")
        with ReplayClient(uri, "replay", tls_root_certs=certificate) as buffer:
            assert len(buffer) == 0
        status, output = run("top", uri, "--once", "--interval", "0.1", "--tls-roots", certificate)
        assert status == 0
        assert "0 steps" in output


def test_a_certificate_that_has_expired_is_served_with_a_warning(tmp_path: Path) -> None:
    certificate, key, request = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "request.pem"))
    for make in (
        f"openssl req -newkey rsa:2048 -nodes -keyout {key} -out {request} -subj /CN=localhost",
        f"openssl x509 -req -in {request} -signkey {key} -days -1 -out {certificate}",
    ):
        subprocess.run(make.split(), check=True, capture_output=True)
    with serving("-t", "replay=uniform:9", "--tls-cert", certificate, "--tls-key", key) as (process, _):
        process.wait_for("^Warning: clients will reject the certificate in .*cert.pem': certificate has expired$")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "--table"),
        (("-t", "replay=unifrom:5"), 2, "did you mean 'uniform'?"),
        (("-t", "r=prioritized:5,alpha=-1"), 2, "alpha must be a number from 0, got -1"),
        (("-t", "r=uniform:5", "-t", "r=uniform:5"), 2, "must have different names, got 'r' twice"),
        (("-t", "r=uniform:5", "--checkpoint-every", "5"), 2, "--checkpoint must be passed with --checkpoint-every"),
        (("-t", "r=uniform:5", "--tls-cert", "c.pem"), 2, "--tls-cert and --tls-key"),
        (("-t", "r=uniform:5", "--token-file", "/nowhere/token"), 2, "No such file or directory: '/nowhere/token'"),
        (("-t", "r=uniform:5", "--token-file", os.devnull), 2, "must contain a token, got an empty file"),
        (("-t", "r=uniform:5", "--checkpoint", os.devnull), 2, "got a file"),
        (("-t", "r=uniform:5,columns=obs:flot32"), 2, "did you mean 'float32'"),
    ],
)
def test_wrong_arguments_of_serve_are_reported_in_one_sentence(
    arguments: tuple[str, ...], status: int, message: str
) -> None:
    actual = CliRunner().invoke(application(), ["serve", *arguments], env={"COLUMNS": "300"})
    assert isinstance(actual.exception, SystemExit)
    assert "Traceback" not in actual.output
    assert actual.exit_code == status
    assert message in " ".join(actual.output.replace("│", " ").split())


def test_a_port_that_is_in_use_is_reported() -> None:
    with serving("-t", "r=uniform:5") as (_, uri):
        status, metadata = run("serve", "-t", "r=uniform:5", "--port", uri.rpartition(":")[2])
    assert status in (1, 2)
    assert "cannot listen at" in metadata
    assert "Traceback" not in metadata


def test_help_explains_options_with_examples() -> None:
    for command, words in (("serve", ("prioritized", "--checkpoint-every", "Examples")), ("top", ("Examples", "URI"))):
        status, output = run(command, "--help")
        assert status == 0
        assert all(word in output for word in words)


# Looking at a service


def test_top_shows_tables_and_who_is_blocked_until_ctrl_c() -> None:
    with (
        serving("-t", "replay=uniform:50,min_size=20") as (_, uri),
        ReplayClient(uri, "replay") as writer,
        ReplayClient(uri, "replay") as learner,
    ):
        writer.extend(episode(0, range(9)))
        writer.flush()
        thread = threading.Thread(target=lambda: learner.sample(4), daemon=True)
        thread.start()
        top = Process("top", uri, "--interval", "0.2")
        top.wait_for(r"replay +│ +9 steps")
        top.wait_for(r"replay: the sample of .* blocked for .* sampling requires 20 items, and there are 9")
        assert top.end() == 130
        assert not any("Traceback" in line for line in top.lines)
        assert top.popen.stdout is not None
        top.popen.stdout.close()
        writer.extend(episode(1, range(20)))
        writer.flush()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_top_reports_that_a_service_cannot_be_reached() -> None:
    status, output = run("top", "grpc://127.0.0.1:1", "--once")
    assert status in (1, 2)
    assert "must be reachable" in output
    assert "Traceback" not in output


def test_rates_are_computed_from_the_time_between_two_readings() -> None:
    from rich.console import Console

    table = ReplayTable("replay", capacity=100, limiter=RateLimiter(2, samples_per_insert=4))
    before = {"replay": table.info()}
    table.extend(episode(0, range(10)))
    table.sample(6)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(draw_tables({"replay": table.info()}, before, 2.0, "title"))
    output = captured.get()
    assert re.search(r"replay +│ 10 steps │ .* MB │ +10 │ +6 │\n│ uniform │ +of 100 │ +│ +5/s │ +3/s │", output)
    assert "replay: limits min_size=2, samples_per_insert=4" in output


def test_tables_of_any_size_are_shown_completely_in_80_columns() -> None:
    from rich.console import Console

    info = ReplayTable("priorities", kind="prioritized", capacity=10**9, limiter=RateLimiter(10**6)).info()
    info |= {"size": 10**9, "nbytes": 10**11, "inserted": 10**9, "sampled": 10**10}
    console = Console(width=80)
    with console.capture() as captured:
        console.print(draw_tables({"priorities": info}, {}, 1.0, "title"))
    assert "…" not in captured.get()
    assert all(number in captured.get() for number in (f"{10**9:,}", f"{10**10:,}"))


# Metrics


def test_metrics_are_read_over_http() -> None:
    with serving("-t", "replay=uniform:50", "-t", "q=queue:3", "--metrics-port", "0") as (process, uri):
        url = process.wait_for(r"Metrics at (http://127\.0\.0\.1:\d+/metrics)")[1]
        with ReplayClient(uri, "replay") as buffer:
            buffer.extend(episode(0, range(9)))
            buffer.sample(4)
        with urlopen(url, timeout=WAIT_S) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            lines = answer.read().decode().splitlines()
        assert 'samplebatch_table_inserted_total{table="replay"} 9' in lines
        assert 'samplebatch_table_size{table="q"} 0' in lines
        with pytest.raises(HTTPError, match="404"):
            urlopen(url + "/other", timeout=WAIT_S)


def test_metrics_conform_to_the_text_format() -> None:
    table = ReplayTable('a "b"\\\n', capacity=5, limiter=RateLimiter(samples_per_insert=2))
    table.extend(SampleBatch(obs=[1], actions=[0], rewards=[0.0], terminateds=[True]))
    lines = render_metrics([table.info()]).splitlines()
    value = re.compile(r'(samplebatch_table_\w+)\{table="a \\"b\\"\\\\\\n"(,action="(insert|sample)")?\} [\d.]+')
    names = [match[1] for line in lines if (match := value.fullmatch(line))]
    described = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert list(dict.fromkeys(names)) == described
    assert len(lines) == len(names) + 2 * len(described)


def test_metrics_report_how_long_requests_are_blocked() -> None:
    table = ReplayTable("replay", capacity=5)

    def sample() -> None:
        with pytest.raises(LimitTimeoutError):
            table.sample(1, timeout_s=2.0)

    thread = threading.Thread(target=sample)
    thread.start()
    time.sleep(0.5)
    lines = dict(line.rsplit(" ", 1) for line in render_metrics([table.info()]).splitlines())
    assert lines['samplebatch_table_held_back{table="replay",action="sample"}'] == "1"
    assert lines['samplebatch_table_held_back{table="replay",action="insert"}'] == "0"
    assert 0.1 < float(lines['samplebatch_table_held_back_seconds{table="replay",action="sample"}']) < 60
    thread.join()


def test_a_port_for_metrics_that_is_in_use_is_rejected() -> None:
    with MetricsServer([ReplayTable("r", capacity=np.int64(5))]) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(SampleBatchError, match=f"the metrics server cannot listen at port {port}"):
            MetricsServer([], port=port)
    with pytest.raises(SampleBatchError, match="cannot listen at port 70000"):
        MetricsServer([], port=70_000)
    with pytest.raises(ArgumentError, match="port must be a whole number from 0, got -1"):
        MetricsServer([], port=-1)
