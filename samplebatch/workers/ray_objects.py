"""Objects in Ray's store: pickled with their memory out of band, and read where they lie."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.workers.task import Fragment

Packed = tuple[bytes, list[Any]]
"""A pickle, and the buffers that it is without: Ray copies these into its store once, and maps them when it reads."""


def pack(value: Any) -> Packed:
    """Pickle a value for Ray's store, its arrays out of band."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def unpack(packed: Packed) -> Any:
    """Copy a value from Ray's store, so that it may be written to.

    >>> value = unpack(pack({"bias": np.zeros(2)}))
    >>> value["bias"] += 1
    >>> value
    {'bias': array([1., 1.])}
    """
    pickled, buffers = packed
    return pickle.loads(pickled, buffers=[bytearray(buffer) for buffer in buffers])


class StoredFragments:
    """Fragments of one worker in Ray's store that the learner still reads: each is pinned there until then.

    Parameters
    ----------
    capacity_bytes
        Twice the bytes that may be pinned, as half of a worker's arena may be lent: further fragments are copied.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> stored = StoredFragments(1600)
    >>> kept = [stored.open(pack(SampleBatch(obs=np.zeros(100)))) for _ in range(2)]
    >>> stored.nbytes
    800
    >>> kept.clear()
    >>> stored.nbytes
    0
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._max_nbytes = capacity_bytes // 2
        self._leases: list[weakref.ref[npt.NDArray[np.uint8]]] = []

    @property
    def nbytes(self) -> int:
        """Bytes in the store that arrays of this process lie in."""
        held = [lease for lease in [tie() for tie in self._leases] if lease is not None]
        self._leases = [weakref.ref(lease) for lease in held]
        return sum(lease.nbytes for lease in held)

    def open(self, packed: Packed) -> Fragment:
        """Read a fragment where it lies; copy it where that would pin too much.

        The only fragment that is held is never copied, however large it is.
        """
        pickled, buffers = packed
        held = self.nbytes
        # Each array over a buffer keeps its lease alive: the last of them to go lets go of the memory.
        leases = [np.ndarray(memoryview(buffer).nbytes, np.uint8, buffer) for buffer in buffers]
        fragment: Fragment = pickle.loads(pickled, buffers=leases)
        if held and held + sum(lease.nbytes for lease in leases) > self._max_nbytes:
            return fragment.copy()
        self._leases += [weakref.ref(lease) for lease in leases]
        return fragment
