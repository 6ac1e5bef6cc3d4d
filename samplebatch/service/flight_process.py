"""FlightProcess: detection of forked children of a process that uses Arrow Flight."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any, Final

from samplebatch.errors import OwnershipError


class FlightProcess:
    """The process whose gRPC threads serve the Flight objects of this interpreter, for clients and servers.

    A forked child inherits the objects without the threads. A destructor in the child would wait for the threads
    forever, or write to a connection of the parent, so the child never destroys the objects.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._objects: weakref.WeakSet[Any] = weakref.WeakSet()
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._enter_child)

    def check(self) -> None:
        """Check that this process may use Flight, before it creates a client or a server.

        Raises OwnershipError if the process was forked from one that used Flight.
        """
        if self._number is None:
            self._number = os.getpid()
        elif self._number != os.getpid():
            raise OwnershipError(
                "a replay client or server must be created in a process with its own gRPC threads, got a forked "
                "child of a process that used a replay service; start processes by 'spawn' or 'forkserver'"
            )

    def register(self, *objects: Any) -> None:
        """Register Flight objects, so that forked children never destroy them."""
        self._objects.update(objects)

    def register_client(self, client: Any) -> None:
        """Register a client, whose `_lock` is replaced in forked children, where its owner thread does not exist."""
        self._clients.add(client)

    def _enter_child(self) -> None:
        """Keep the inherited objects alive until the forked child has ended, including interpreter shutdown."""
        for client in list(self._clients):
            client._lock = threading.RLock()
        inherited = list(self._objects)
        for owner in inherited:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
        # Arrow shuts down a server at the interpreter's exit, too.
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            alive = finalizer.peek()
            if alive is not None and any(alive[0] is owner for owner in inherited):
                finalizer.atexit = False


flight_process: Final = FlightProcess()
