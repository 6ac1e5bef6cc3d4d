"""`samplebatch serve`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from samplebatch.cli.terminal import FAILED, INTERRUPTED, Interruption, complain, megabytes, say
from samplebatch.errors import ArgumentError, SampleBatchError
from samplebatch.service.checkpoint import Checkpoints
from samplebatch.service.metrics import MetricsServer
from samplebatch.service.row_table import RowTable
from samplebatch.service.server import ReplayServer, read_pair
from samplebatch.service.table import ReplayTable, parse_table
from samplebatch.service.weights import PublishedWeights


@dataclass(frozen=True)
class Serving:
    """Options of `samplebatch serve`."""

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
    """Serve tables until Ctrl-C or SIGTERM; return the exit status, 1 if the last checkpoint was not written."""
    tables = [parse_table(text) for text in options.tables]
    checkpoints, weights = None, PublishedWeights()
    if options.checkpoint is not None:
        checkpoints = Checkpoints(options.checkpoint, keep=options.keep, allow_pickle=options.allow_pickle)
        restored = checkpoints.restore(tables, weights)
        if restored is not None:
            say(f"Restored {_sizes(tables, {table.name: len(table) for table in tables})} from {restored}")
    token = None if options.token_file is None else read_token(options.token_file)
    with Interruption() as interruption, contextlib.ExitStack() as stack:
        write = None if checkpoints is None else lambda: checkpoints.write(tables, weights).path
        server = stack.enter_context(_make_server(options, tables, token, write, weights))
        say(f"Serving {', '.join(map(repr, tables))} at {server.uri}")
        if token is None and not _is_loopback(options.host):
            say(
                f"Anybody who reaches port {server.port} may read and write: --token-file asks clients for a word",
                stderr=True,
            )
        if options.metrics_port is not None:
            metrics = stack.enter_context(MetricsServer(tables, port=options.metrics_port))
            say(f"Metrics at {metrics.url}")
        while not interruption.wait(options.every_s):
            if checkpoints is not None:
                # A failure is reported, and serving continues.
                _write(checkpoints, tables, weights)
    # No client can write any more.
    if checkpoints is not None and not _write(checkpoints, tables, weights):
        return FAILED
    # SIGTERM is the regular way to stop a service.
    return INTERRUPTED if interruption.status == INTERRUPTED else 0


def _make_server(
    options: Serving,
    tables: Sequence[ReplayTable | RowTable],
    token: str | None,
    write: Callable[[], Any] | None,
    weights: PublishedWeights,
) -> ReplayServer:
    """Create the server; errors of TLS files name their option, and warnings are printed as lines."""
    if options.tls is not None:
        read_pair(options.tls, ("--tls-cert", "--tls-key"))
    with warnings.catch_warnings(record=True) as caught:
        server = ReplayServer(
            tables,
            host=options.host,
            port=options.port,
            token=token,
            tls=options.tls,
            checkpoint=write,
            weights=weights,
        )
    for warning in caught:
        say(f"Warning: {warning.message}", stderr=True)
    return server


def read_token(path: Path) -> str:
    """Read the token of clients from a file."""
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ArgumentError(f"{str(path)!r} must contain a token, got an empty file")
    return token


def _is_loopback(host: str) -> bool:
    """Return whether a server that listens on an address is reachable only from this machine.

    >>> _is_loopback("127.0.0.2"), _is_loopback("::1"), _is_loopback("localhost"), _is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write(
    checkpoints: Checkpoints, tables: Sequence[ReplayTable | RowTable], weights: PublishedWeights | None = None
) -> bool:
    """Write a checkpoint or report the error; return whether it was saved."""
    try:
        saved = checkpoints.write(tables, weights)
    except (SampleBatchError, OSError) as error:
        complain(f"no checkpoint was written: {error}")
        return False
    except Exception as error:
        # For example out of memory: continue, because only the service has the rows.
        complain(f"no checkpoint was written: {type(error).__name__}: {error}")
        return False
    say(f"Wrote {_sizes(tables, saved.sizes)} ({megabytes(saved.nbytes)}) to {saved.path} in {saved.seconds:.1f} s")
    return True


def _sizes(tables: Sequence[ReplayTable | RowTable], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{sizes[table.name]} {table.unit} of {table.name!r}" for table in tables)
