"""SlowLink: a TCP link of tests, which delays all bytes and breaks its connections, as a network that loses packets."""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

_CHUNK_NBYTES: Final = 1 << 16
_MAX_CHUNKS: Final = 256
"""Chunks on their way in one direction; a sender waits until there are fewer."""
_POLL_S: Final = 0.05


class SlowLink:
    """TCP proxy of a service on this machine that simulates remote clients.

    Bytes are delivered in order after a delay. Packet loss on TCP causes delays and finally a broken connection, so the
    link closes each connection after a random number of bytes and discards all bytes in transit.

    Parameters
    ----------
    port
        Port of the service.
    delay_s
        Delay in seconds per direction; a round trip has twice this delay.
    cut_sent, cut_received
        Mean number of bytes to and from the service after which a connection is closed; by default, never.
    seed
        Seed of these random numbers.

    Attributes
    ----------
    uri
        Address for clients.
    cuts
        Number of closed connections.
    """

    def __init__(
        self,
        port: int,
        delay_s: float = 0.0,
        *,
        cut_sent: float = math.inf,
        cut_received: float = math.inf,
        seed: int = 0,
    ) -> None:
        self._port, self._delay_s = port, delay_s
        self._means = cut_sent, cut_received
        self._rng = np.random.default_rng(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_POLL_S)
        self._closed = threading.Event()
        self._open: dict[threading.Thread, tuple[socket.socket, socket.socket]] = {}
        self._accepting = threading.Thread(target=self._accept, name="slow-link", daemon=True)
        self._accepting.start()
        self.uri = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0

    def close(self) -> None:
        """Close all connections, and wait until none is open."""
        self._closed.set()
        self._accepting.join()
        self._listener.close()
        for connection, ends in list(self._open.items()):
            _shut(*ends)
            connection.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError):
                near, _ = self._listener.accept()
                near.settimeout(None)
                left = [self._rng.exponential(mean) if mean < math.inf else mean for mean in self._means]
                try:
                    far = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    near.close()
                    continue
                connection = threading.Thread(target=self._connect, args=(near, far, left), daemon=True)
                self._open[connection] = near, far
                connection.start()

    def _connect(self, near: socket.socket, far: socket.socket, left: list[float]) -> None:
        """Forward bytes in both directions until both ends, or a cut, have ended the connection."""
        with near, far:
            back = threading.Thread(target=self._carry, args=(far, near, left[1]), daemon=True)
            back.start()
            self._carry(near, far, left[0])
            back.join()
        self._open.pop(threading.current_thread(), None)

    def _carry(self, source: socket.socket, sink: socket.socket, left: float) -> None:
        """Forward bytes in one direction until the source ends."""
        line: queue.Queue[tuple[float, bytes]] = queue.Queue(_MAX_CHUNKS)
        delivering = threading.Thread(target=self._deliver, args=(line, source, sink, left), daemon=True)
        delivering.start()
        for chunk in _chunks(source):
            line.put((time.monotonic() + self._delay_s, chunk))
        line.put((time.monotonic() + self._delay_s, b""))
        delivering.join()

    def _deliver(
        self, line: queue.Queue[tuple[float, bytes]], source: socket.socket, sink: socket.socket, left: float
    ) -> None:
        """Deliver bytes when they are due; close the connection after `left` bytes."""
        is_cut = False
        while True:
            due, chunk = line.get()
            if not chunk:
                break
            if is_cut:
                continue
            time.sleep(max(0.0, due - time.monotonic()))
            is_cut = len(chunk) >= left
            with suppress(OSError):
                sink.sendall(chunk[: int(left)] if is_cut else chunk)
            left -= len(chunk)
            if is_cut:
                self.cuts += 1
                _shut(source, sink)
        time.sleep(max(0.0, due - time.monotonic()))
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _chunks(source: socket.socket) -> Iterator[bytes]:
    """Yield the received bytes of a connection until it ends."""
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_NBYTES):
            yield chunk


def _shut(*ends: socket.socket) -> None:
    """Close a connection immediately, even if another thread waits for it."""
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_link(port: int, delay_s: float = 0.0, **cuts: float) -> Iterator[SlowLink]:
    """Open a `SlowLink` and close it at the end of the context."""
    link = SlowLink(port, delay_s, **cuts)  # type: ignore[arg-type]
    try:
        yield link
    finally:
        link.close()
