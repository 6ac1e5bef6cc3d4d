"""FlightProcess: detection of forked children of a process that uses Arrow Flight."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any, Final

from samplebatch.errors import OwnershipError


class FlightProcess:
    """Registry of this interpreter's Flight clients and servers, and of the process that runs their gRPC threads.

    A forked child inherits the Flight objects without the gRPC threads. In the child, the destructor of a Flight object
    would wait for the threads forever or write to a connection of the parent. The child therefore never destroys
    Flight objects.
    """

    def __init__(self) -> None:
        self._process_id: int | None = None
        self._objects: weakref.WeakSet[Any] = weakref.WeakSet()
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._enter_child)

    def check(self) -> None:
        """Check that this process may create a Flight client or server.

        Raises OwnershipError if this process was forked from a process that used Flight.
        """
        if self._process_id is None:
            self._process_id = os.getpid()
        elif self._process_id != os.getpid():
            raise OwnershipError(
                "a replay client or server must be created in a process with its own gRPC threads, got a forked "
                "child of a process that used a replay service; start processes by 'spawn' or 'forkserver'"
            )

    def register(self, *objects: Any) -> None:
        """Register Flight objects that forked children must not destroy."""
        self._objects.update(objects)

    def register_client(self, client: Any) -> None:
        """Register a client; forked children replace `_lock`, because the lock's thread does not exist in the child."""
        self._clients.add(client)

    def _enter_child(self) -> None:
        """Replace the locks of inherited clients, and keep inherited Flight objects alive until the child exits."""
        for client in list(self._clients):
            client._lock = threading.RLock()
        inherited = list(self._objects)
        for owner in inherited:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
        # Arrow also shuts down servers when the interpreter exits.
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            details = finalizer.peek()
            if details is not None and any(details[0] is owner for owner in inherited):
                finalizer.atexit = False


flight_process: Final = FlightProcess()
