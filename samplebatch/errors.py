"""The exceptions of the library, and the functions that word them.

::

    SampleBatchError
    ├── ColumnNotFoundError   (KeyError)     no column of that name
    │   └── PolicyNotFoundError              no policy of that id
    ├── ColumnLengthError     (ValueError)   a column's rows do not match the batch's
    ├── ColumnTypeError       (TypeError)    a value or dtype that no column can hold
    ├── ColumnMismatchError   (ValueError)   batches that cannot be joined: names, dtypes or row shapes differ
    ├── ArgumentError         (ValueError)   an argument outside of the values that it may have
    ├── RowIndexError         (IndexError)   a row outside the batch
    ├── SequenceError         (ValueError)   seq_lens, padding or time layout do not allow it
    ├── PriorityError         (ValueError)   a weight or priority that nothing can be drawn by
    ├── CompressedColumnError (ValueError)   compressed blocks that do not decompress to what they claim
    ├── FormatError           (ValueError)   bytes from a file or another process that are not what they claim
    ├── UntrustedPickleError  (ValueError)   reading it means unpickling, which the caller has not allowed
    ├── UnstorableError       (NotImplementedError) a value that the file's format has no form for
    ├── DeviceError           (ValueError)   a device that is not there, or its memory where the host's is needed
    ├── SharedMemoryError     (MemoryError)  shared memory that is not to be had
    ├── StorageError          (OSError)      a buffer's folder that is open elsewhere, closed or full
    ├── EmptyBufferError      (ValueError)   rows drawn from a buffer that has none
    ├── RingError             (ValueError)   buffer_ids or an interval that do not fit a buffer's rings
    ├── CapacityError         (ValueError)   a batch that is larger than what is to carry it
    ├── ChannelTimeoutError   (TimeoutError) a channel that had no room, or nothing to receive, in the time given
    ├── ChannelClosedError    (BrokenPipeError) an end of a channel that is closed
    ├── EndOfStreamError      (EOFError)     nothing more to receive: the producer has closed its end
    ├── PeerDiedError         (ConnectionError) the process at the other end died without closing it
    ├── NonFiniteLossError    (FloatingPointError) a loss that is NaN or infinite, so that training stops
    ├── OwnershipError        (RuntimeError) an end of a channel that another process has used
    ├── LeaseError            (BufferError)  arrays of a leased batch that outlive its lease
    ├── ReleasedError         (ValueError)   a reservation that was sent or cancelled before
    ├── EnvironmentSpecError  (ValueError)   an environment that cannot be made or stepped as asked
    ├── PolicySpecError       (ValueError)   a policy that cannot be asked for actions, or gives none that fit
    ├── WorkerError           (RuntimeError) a rollout worker failed or died
    ├── LimitTimeoutError     (TimeoutError) a replay table that held back an insert or a sample for the time given
    ├── TableClosedError      (RuntimeError) a replay table that is closed
    ├── AbandonedError        (RuntimeError) a request to a replay table that nobody waits for any more
    ├── ServiceError          (ConnectionError) a replay service that cannot be reached, is closed, or fails
    ├── AccessError           (PermissionError) a replay service that wants another token, or is not trusted
    └── MissingExtraError     (ImportError)  an optional dependency is not installed

Every message is one sentence: what must hold, what was found, what to do. It names the column and never shows data.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType


class SampleBatchError(Exception):
    """Root of every error that the library raises on purpose."""


class ColumnNotFoundError(SampleBatchError, KeyError):
    """No column of that name."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would quote the whole sentence.
        return str(self.args[0]) if self.args else ""


class PolicyNotFoundError(ColumnNotFoundError):
    """No policy of that id."""


class ColumnLengthError(SampleBatchError, ValueError):
    """A column's number of rows does not match the batch's."""


class ColumnTypeError(SampleBatchError, TypeError):
    """A value or dtype that no column can hold."""


class ColumnMismatchError(SampleBatchError, ValueError):
    """Batches that cannot be joined, because names, dtypes or row shapes differ."""


class ArgumentError(SampleBatchError, ValueError):
    """An argument has a value that it must not have: a fraction of a thing, a discount above 1, an unknown word."""


class RowIndexError(SampleBatchError, IndexError):
    """A row index outside the batch, or a key that selects no rows."""


class SequenceError(SampleBatchError, ValueError):
    """The sequence lengths, the padding or the time layout do not allow the operation."""


class PriorityError(SampleBatchError, ValueError):
    """A weight or priority that is no finite number from 0, or weights by which nothing can be drawn."""


class CompressedColumnError(SampleBatchError, ValueError):
    """Compressed blocks that do not decompress to the rows they claim to hold."""


class FormatError(SampleBatchError, ValueError):
    """Bytes from a file or another process that break the format they claim to have."""


class UntrustedPickleError(SampleBatchError, ValueError):
    """Reading the data means unpickling it, and the caller has not allowed that."""


class UnstorableError(SampleBatchError, NotImplementedError):
    """A value that the format of a file has no form for, and that cannot be pickled into it either."""


class DeviceError(SampleBatchError, ValueError):
    """A device that torch cannot use here, or memory on a device that is needed on the host."""


class SharedMemoryError(SampleBatchError, MemoryError):
    """Shared memory that is not to be had: the machine, a limit or a file system has too little left."""


class StorageError(SampleBatchError, OSError):
    """A buffer's folder cannot be used: it is open elsewhere, closed, or the disk is full."""


class EmptyBufferError(SampleBatchError, ValueError):
    """Rows were drawn from a buffer that has none, or none that may be drawn."""


class RingError(SampleBatchError, ValueError):
    """Rows for rings that a buffer does not have, or an interval that is not of one ring."""


class CapacityError(SampleBatchError, ValueError):
    """A batch is larger than the channel, buffer or bound that is to take it."""


class ChannelTimeoutError(SampleBatchError, TimeoutError):
    """A channel had no room for a batch, or none to receive, in the time given."""


class ChannelClosedError(SampleBatchError, BrokenPipeError):
    """An end of a channel is closed: this one, or the consumer that a batch is sent to."""


class EndOfStreamError(SampleBatchError, EOFError):
    """There is nothing more to receive: the producer has closed its end."""


class PeerDiedError(SampleBatchError, ConnectionError):
    """The process at the other end of a channel died without closing it."""


class NonFiniteLossError(SampleBatchError, FloatingPointError):
    """A loss is NaN or infinite: a gradient step down it would make the weights NaN."""


class OwnershipError(SampleBatchError, RuntimeError):
    """An object of one process, such as an end of a channel or a replay client, is used in a second process."""


class LeaseError(SampleBatchError, BufferError):
    """Arrays, slices or tensors of a leased batch outlive its lease."""


class ReleasedError(SampleBatchError, ValueError):
    """A reservation is used after it was sent or cancelled."""


class EnvironmentSpecError(SampleBatchError, ValueError):
    """An environment that cannot be made, or cannot be stepped as asked."""


class PolicySpecError(SampleBatchError, ValueError):
    """A policy that cannot be asked for actions, or that gives none that fit."""


class WorkerError(SampleBatchError, RuntimeError):
    """A rollout worker raised, hung or died."""


class LimitTimeoutError(SampleBatchError, TimeoutError):
    """The limits of a replay table held back an insert or a sample for the time given.

    Attributes
    ----------
    why
        The limit that held it back, as a clause.
    since
        When it came to the table, in seconds of Unix time.
    """

    def __init__(self, sentence: str, why: str = "", since: float = 0.0) -> None:
        super().__init__(sentence)
        self.why = why
        self.since = since


class TableClosedError(SampleBatchError, RuntimeError):
    """A replay table is closed, and takes and gives nothing any more."""


class AbandonedError(SampleBatchError, RuntimeError):
    """A request that a replay table held back has nobody any more who waits for its answer."""


class ServiceError(SampleBatchError, ConnectionError):
    """A replay service cannot be reached, has been closed, or fails for a reason that it does not tell."""


class AccessError(SampleBatchError, PermissionError):
    """A replay service refuses a client that has not its token, or a client the certificate of a service."""


class MissingExtraError(SampleBatchError, ImportError):
    """An optional dependency is not installed."""


def near_names(name: object, known: Iterable[object]) -> str:
    """Word a hint for a name that is not there: the near ones, else the ones there are.

    >>> near_names("reward", ["obs", "rewards"])
    "did you mean 'rewards'?"
    >>> near_names("x", ["obs", "rewards"])
    "there are 'obs', 'rewards'"
    """
    # Ids of policies may be integers.
    names = {str(n): repr(n) for n in known}
    if not names:
        return "there are none"
    near = difflib.get_close_matches(str(name), names, n=3)
    if near:
        return f"did you mean {' or '.join(map(names.__getitem__, near))}?"
    shown = ", ".join([*names.values()][:12])
    return f"there are {shown}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def no_such_column(name: object, known: Iterable[str]) -> ColumnNotFoundError:
    """Word the error for a column that is not there."""
    return ColumnNotFoundError(f"no column {name!r}; {near_names(name, known)}")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or say which extra brings it.

    Raises
    ------
    MissingExtraError
        If the module is not installed; names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not module.startswith(error.name):
            raise
        raise MissingExtraError(
            f"{module!r} is not installed; install it with: pip install 'samplebatch[{extra}]'"
        ) from error
