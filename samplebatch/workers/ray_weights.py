"""StoredWeights: the newest weights of a run in Ray's object store, put there once a version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from samplebatch.errors import ChannelClosedError
from samplebatch.transport.encode import Encoder
from samplebatch.transport.subscription import Publication
from samplebatch.transport.weights import as_batch, as_dict
from samplebatch.workers.backend import Weights
from samplebatch.workers.ray_objects import pack, unpack


class StoredWeights(Weights):
    """The newest weights, as a reference that goes to actors with their calls.

    Parameters
    ----------
    connect
        Returns the module `ray`, connected to a cluster.

    Attributes
    ----------
    newest
        Their number, and a list with the reference to them; 0 and an empty list before the first.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.newest: tuple[int, list[Any]] = (0, [])
        self._connect = connect
        self._encoder = Encoder(allow_pickle=False)
        self._publishing = threading.Lock()
        self._is_closed = False

    @property
    def version(self) -> int:
        """How many weights have been published."""
        return self.newest[0]

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Put weights into the store; see `Weights.publish`.

        Raises
        ------
        ColumnTypeError, DeviceError, UntrustedPickleError
            As `Publisher.publish` does.
        ChannelClosedError
            If workers have been stopped.
        """
        self.check_open()
        batch = as_batch(weights)
        with self._publishing:
            # A value that cannot be sent is refused here, as a broadcast refuses it.
            self._encoder.encode(batch)
            version = self.version + 1
            self.newest = version, [self._connect().put(pack(batch))]
        return version

    def latest(self) -> Publication:
        """Copy the newest weights."""
        version, (reference,) = self.newest
        return read_weights(self._connect(), version, reference)

    def check_open(self) -> None:
        """Refuse to go on with workers that have been stopped.

        Raises
        ------
        ChannelClosedError
            If they have.
        """
        if self._is_closed:
            raise ChannelClosedError("workers must be running to be given weights, and they have been stopped")

    def close(self) -> None:
        """Let go of the reference: the store drops weights that no actor reads any more."""
        self._is_closed = True
        self.newest = self.version, []


def read_weights(ray: Any, version: int, reference: Any) -> Publication:
    """Copy weights that `StoredWeights` has put into the store."""
    return Publication(version, as_dict(unpack(ray.get(reference))))
