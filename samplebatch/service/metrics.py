"""MetricsServer: sizes, counts and limits of tables over HTTP, in Prometheus's text format."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from samplebatch.arguments import whole
from samplebatch.errors import ServiceError
from samplebatch.service.row_table import RowTable
from samplebatch.service.table import ReplayTable

_CONTENT = "text/plain; version=0.0.4; charset=utf-8"
_FACTS = (
    ("size", "gauge", "Items in the table."),
    ("capacity", "gauge", "Items that the table has room for."),
    ("nbytes", "gauge", "Memory of the items in bytes."),
    ("inserted", "counter", "Items inserted since the table was empty."),
    ("sampled", "counter", "Items sampled since the table was empty."),
)
_LIMITS = (
    ("min_size", "Items that sampling needs."),
    ("samples_per_insert", "Samples that each insert earns."),
    ("error_buffer", "How far samples may be ahead or behind."),
    ("max_times_sampled", "How often each item may be sampled, 0 for any number of times."),
)
_TIMEOUT_S = 10.0


def render_metrics(infos: Iterable[dict[str, Any]]) -> str:
    """Write the state of tables in Prometheus's text format.

    - `infos`: what `ReplayTable.info` returned of each.

    >>> table = ReplayTable("replay", capacity=100)
    >>> print(render_metrics([table.info()]).splitlines()[2])
    samplebatch_table_size{table="replay"} 0
    """
    tables = list(infos)
    lines: list[str] = []
    for name, kind, help_text in _FACTS:
        metric = f"samplebatch_table_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} {kind}"]
        lines += [f"{metric}{_labels(table=info['name'])} {info[name]}" for info in tables]
    for name, help_text in _LIMITS:
        metric = f"samplebatch_table_{name}"
        lines += [f"# HELP {metric} {help_text}", f"# TYPE {metric} gauge"]
        values = [(info["name"], info["limits"][name]) for info in tables]
        lines += [f"{metric}{_labels(table=table)} {value}" for table, value in values if value is not None]
    return "\n".join([*lines, *_held_back(tables), ""])


def _held_back(infos: list[dict[str, Any]]) -> Iterator[str]:
    """Write the number of blocked requests and the longest waiting time."""
    now = time.time()
    count, longest = "samplebatch_table_held_back", "samplebatch_table_held_back_seconds"
    values: dict[str, list[str]] = {count: [], longest: []}
    for info in infos:
        for action in ("insert", "sample"):
            since = [request["since"] for request in info["held_back"] if request["action"] == action]
            labels = _labels(table=info["name"], action=action)
            values[count].append(f"{count}{labels} {len(since)}")
            values[longest].append(f"{longest}{labels} {max([now - min(since, default=now), 0.0]):.3f}")
    for metric, help_text in (
        (count, "Requests that a limit holds back."),
        (longest, "Seconds for which the oldest blocked request has waited."),
    ):
        yield from (f"# HELP {metric} {help_text}", f"# TYPE {metric} gauge", *values[metric])


def _labels(**labels: str) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


class MetricsServer:
    """The metrics of replay tables over HTTP, at `/metrics`, for Prometheus on this machine.

    Parameters
    ----------
    tables
        The tables.
    port
        The port on the loopback interface; 0 for any that is free.

    Raises
    ------
    ArgumentError
        If the port is no integer from 0.
    ServiceError
        If it cannot listen there.

    Attributes
    ----------
    url
        Where the metrics are.

    Examples
    --------
    >>> from urllib.request import urlopen
    >>> with MetricsServer([ReplayTable("replay", capacity=100)]) as server:
    ...     text = urlopen(server.url).read().decode()
    >>> 'samplebatch_table_capacity{table="replay"} 100' in text.splitlines()
    True
    """

    def __init__(self, tables: Iterable[ReplayTable | RowTable], *, port: int = 0) -> None:
        handler = type("_Handler", (_Handler,), {"tables": list(tables)})
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", whole("port", port)), handler)
        except (OSError, OverflowError) as error:
            raise ServiceError(f"metrics must have a port to listen at, {port} is none: {error}") from error
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/metrics"
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, name="samplebatch-metrics", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop to listen. A forked child only drops the server."""
        if self._thread is not None and self._process == os.getpid():
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers a request for metrics."""

    tables: list[ReplayTable | RowTable]
    timeout = _TIMEOUT_S
    server_version = "samplebatch"

    def do_GET(self) -> None:
        """Write the metrics, or that there is nothing else."""
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = render_metrics(table.info() for table in self.tables).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _CONTENT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep quiet: who looks every few seconds is no news."""
        return None
