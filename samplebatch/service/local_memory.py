"""Local memory: samples that a client on the same machine maps, in place of being sent them.

The service keeps a secret in shared memory without a name. Who can tell it has mapped that memory, and so can map the
samples, too: each lies in a region of its own, as an Arrow stream, until the client's last array over it is gone.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import Any, Final

from samplebatch.column.stream_layout import Bytes
from samplebatch.errors import FormatError, SampleBatchError
from samplebatch.service.sample_streams import Stream
from samplebatch.transport.region import Region
from samplebatch.transport.shared_queue import Address, SharedQueueMemory, receive

_SECRET_NBYTES: Final = 32
_MIN_NBYTES: Final = 1 << 16
"""Bytes of a sample from which mapping it is faster than being sent it."""


class Secret:
    """A random number in shared memory of the service, which only clients on the same machine can read."""

    def __init__(self) -> None:
        self._value = secrets.token_bytes(_SECRET_NBYTES)
        self._region: Region | None = None

    def address(self) -> dict[str, Any]:
        """Return where a client finds the secret; empty if this machine has no such memory."""
        if not os.path.isdir("/proc/self/fd"):
            return {}
        if self._region is None:
            try:
                region = Region.create(_SECRET_NBYTES)
            except SampleBatchError:
                return {}
            region.memory[:] = self._value
            self._region = region
        return {"path": f"/proc/{os.getpid()}/fd/{self._region.fileno()}", "nbytes": _SECRET_NBYTES}

    def open(self, told: str, max_nbytes: int) -> SampleMemory | None:
        """Return memory for the samples of a client that tells the secret in hexadecimal digits; None for any other."""
        return SampleMemory(max_nbytes) if hmac.compare_digest(told.encode(), self._value.hex().encode()) else None

    def close(self) -> None:
        """Free the memory."""
        if self._region is not None:
            self._region.close()


def read_secret(address: dict[str, Any]) -> str | None:
    """Read the secret of a service from its memory, in hexadecimal digits; None if it is on another machine."""
    try:
        descriptor = os.open(str(address["path"]), os.O_RDWR | os.O_CLOEXEC)
        with Region.attach(descriptor, int(address["nbytes"])) as region:
            return bytes(region.memory).hex()
    except (OSError, KeyError, ValueError, TypeError):
        return None


class SampleMemory:
    """The regions that the samples of one client lie in, on the service's side.

    Parameters
    ----------
    max_nbytes
        Bytes that they may take.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._memory = SharedQueueMemory(max_nbytes)

    def put(self, stream: Stream) -> list[Any] | None:
        """Write a sample into a region, as an Arrow stream.

        Returns
        -------
        Where `take` finds it; None if it is small, or there is no room.
        """
        nbytes = stream.nbytes
        if nbytes < _MIN_NBYTES or self._memory.lent_nbytes + nbytes > self._max_nbytes:
            return None
        written = self._memory.write(nbytes, stream.write)
        return None if written is None else [*written[0], *written[1]]

    def close(self) -> None:
        """Let go of all regions; samples that the client has live on."""
        self._memory.close()


def take(place: Any) -> Bytes:
    """Map the stream of a sample that the service has put into a region, read-only.

    Raises
    ------
    FormatError, PeerDiedError
        If it is not there, or the service has ended.
    """
    try:
        *address, start, nbytes = place
        (stream,) = receive(Address(*address), [(start, nbytes)])
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, SampleBatchError):
            raise
        raise FormatError("a sample in shared memory must be where the service says, it is not") from error
    stream.flags.writeable = False
    return stream
