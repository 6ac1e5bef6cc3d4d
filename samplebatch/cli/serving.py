"""`samplebatch serve`."""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from samplebatch.cli.display import complain, megabytes, say
from samplebatch.errors import ArgumentError, SampleBatchError
from samplebatch.service.certificates import read_pair
from samplebatch.service.checkpoint import Checkpoints
from samplebatch.service.metrics import MetricsServer
from samplebatch.service.server import ReplayServer
from samplebatch.service.table import ReplayTable
from samplebatch.service.table_spec import parse_table

INTERRUPTED = 130


@dataclass(frozen=True)
class Serving:
    """The options of `samplebatch serve`."""

    tables: Sequence[str]
    host: str
    port: int
    checkpoint: Path | None
    every_s: float | None
    keep: int
    token_file: Path | None
    tls: tuple[Path, Path] | None
    metrics_port: int | None
    allow_pickle: bool


def serve(options: Serving) -> int:
    """Serve tables until Ctrl-C or SIGTERM, and return the exit status."""
    tables = [parse_table(text) for text in options.tables]
    checkpoints = None
    if options.checkpoint is not None:
        checkpoints = Checkpoints(options.checkpoint, keep=options.keep, allow_pickle=options.allow_pickle)
        restored = checkpoints.restore(tables)
        if restored is not None:
            say(f"Restored {_sizes(tables, {table.name: len(table) for table in tables})} from {restored}")
    token = None if options.token_file is None else read_token(options.token_file)
    with _stop_on_signals() as stop, contextlib.ExitStack() as stack:
        write = None if checkpoints is None else lambda: checkpoints.write(tables).path
        server = stack.enter_context(_make_server(options, tables, token, write))
        say(f"Serving {', '.join(map(repr, tables))} at {server.uri}")
        if token is None and not _is_loopback(options.host):
            say(
                f"Anybody who reaches port {server.port} may read and write: --token-file asks clients for a word",
                stderr=True,
            )
        if options.metrics_port is not None:
            metrics = stack.enter_context(MetricsServer(tables, port=options.metrics_port))
            say(f"Metrics at {metrics.url}")
        if checkpoints is None:
            stop.wait()
        else:
            _write_checkpoints(checkpoints, tables, options.every_s, stop)
    # Nobody writes any more.
    if checkpoints is not None:
        _write(checkpoints, tables)
    return stop.status


def _make_server(
    options: Serving, tables: Sequence[ReplayTable], token: str | None, write: Callable[[], Any] | None
) -> ReplayServer:
    """Make the server; a file that it cannot encrypt with is named by its option, and warnings are lines as others."""
    if options.tls is not None:
        read_pair(options.tls, ("--tls-cert", "--tls-key"))
    with warnings.catch_warnings(record=True) as caught:
        server = ReplayServer(
            tables, host=options.host, port=options.port, token=token, tls=options.tls, checkpoint=write
        )
    for warning in caught:
        say(f"Warning: {warning.message}", stderr=True)
    return server


def read_token(path: Path) -> str:
    """Read the word that clients must bring.

    Raises
    ------
    ArgumentError
        If the file has none.
    OSError
        If it cannot be read.
    """
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ArgumentError(f"{str(path)!r} must have a token, it is empty")
    return token


def _is_loopback(host: str) -> bool:
    """Tell whether a server that listens at an address is reached from this machine alone.

    >>> _is_loopback("127.0.0.2"), _is_loopback("::1"), _is_loopback("localhost"), _is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Stop(threading.Event):
    """Set by a signal; `status` is then the exit status for it."""

    status = 0


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    """Let the first Ctrl-C or SIGTERM end the serving, and a second Ctrl-C the program."""
    stop = _Stop()

    def end(number: int, _: Any) -> None:
        stop.status = INTERRUPTED if number == signal.SIGINT else 0
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_checkpoints(
    checkpoints: Checkpoints, tables: Sequence[ReplayTable], every_s: float | None, stop: _Stop
) -> None:
    """Write a checkpoint every so often until the serving ends; a failure is told, and serving goes on."""
    while not stop.wait(every_s):
        _write(checkpoints, tables)


def _write(checkpoints: Checkpoints, tables: Sequence[ReplayTable]) -> None:
    try:
        found = checkpoints.write(tables)
    except (SampleBatchError, OSError) as error:
        complain(f"no checkpoint was written: {error}")
    else:
        say(f"Wrote {_sizes(tables, found.sizes)} ({megabytes(found.nbytes)}) to {found.path} in {found.seconds:.1f} s")


def _sizes(tables: Sequence[ReplayTable], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{sizes[table.name]} {table.unit} of {table.name!r}" for table in tables)
