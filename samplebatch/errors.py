"""Exceptions of the library, and functions that format their messages.

::

    SampleBatchError
    ├── ColumnNotFoundError   (KeyError)     unknown column
    │   └── PolicyNotFoundError              unknown policy
    ├── ColumnLengthError     (ValueError)   a column's number of rows does not match the batch
    ├── ColumnTypeError       (TypeError)    unsupported value or dtype of a column
    ├── ColumnMismatchError   (ValueError)   names, dtypes or row shapes of batches differ
    ├── ArgumentError         (ValueError)   invalid argument
    ├── RowIndexError         (IndexError)   row index out of range
    ├── SequenceError         (ValueError)   seq_lens, padding or time layout prevent the operation
    ├── PriorityError         (ValueError)   weight or priority that prevents sampling
    ├── CompressedColumnError (ValueError)   compressed blocks do not decompress to the declared rows
    ├── FormatError           (ValueError)   invalid bytes from a file or another process
    ├── UntrustedPickleError  (ValueError)   reading requires unpickling, which the caller has not permitted
    ├── UnstorableError       (NotImplementedError) value that a file format cannot represent
    ├── DeviceError           (ValueError)   unavailable device, or device memory where host memory is required
    ├── SharedMemoryError     (MemoryError)  shared memory cannot be allocated
    ├── StorageError          (OSError)      buffer folder open elsewhere, closed or full
    ├── EmptyBufferError      (ValueError)   sampling from an empty buffer
    ├── RingError             (ValueError)   buffer_ids or interval do not fit a buffer's rings
    ├── CapacityError         (ValueError)   batch larger than the capacity of its destination
    ├── ChannelTimeoutError   (TimeoutError) no space or nothing to receive in a channel before the timeout
    ├── ChannelClosedError    (BrokenPipeError) closed end of a channel
    ├── EndOfStreamError      (EOFError)     producer closed its end; nothing more to receive
    ├── PeerDiedError         (ConnectionError) process at the other end died without closing it
    ├── NonFiniteLossError    (FloatingPointError) NaN or infinite loss stopped training
    ├── OwnershipError        (RuntimeError) end of a channel is in use by another process
    ├── LeaseError            (BufferError)  arrays of a leased batch outlive its lease
    ├── ReleasedError         (ValueError)   reservation already sent or cancelled
    ├── EnvironmentSpecError  (ValueError)   environment cannot be created or stepped as requested
    ├── PolicySpecError       (ValueError)   policy is not callable or returns invalid actions
    ├── WorkerError           (RuntimeError) rollout worker failed or died
    ├── LimitTimeoutError     (TimeoutError) rate limit of a replay table blocked a request until the timeout
    ├── TableClosedError      (RuntimeError) closed replay table
    ├── AbandonedError        (RuntimeError) blocked request to a replay table whose client is gone
    ├── ServiceError          (ConnectionError) replay service unreachable, closed or failed
    ├── AccessError           (PermissionError) replay service rejected the token, or is not trusted
    └── MissingExtraError     (ImportError)  optional dependency not installed

Every message is one sentence that states the requirement, the actual value, and the remedy. A message contains the name
of the column, argument, file or service that caused the error, but never the data of a column.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Final


class SampleBatchError(Exception):
    """Base class of all errors that the library raises.

    The middle of a message with more than 10,000 characters is omitted, because names in files may have any length.

    >>> str(SampleBatchError("x" * 1_000_000))[8000:8040]
    ' [... 990000 characters omitted ...] xxx'
    """

    def __str__(self) -> str:
        return _without_middle(super().__str__())


class ColumnNotFoundError(SampleBatchError, KeyError):
    """Unknown column name."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would quote the whole sentence.
        return _without_middle(str(self.args[0]) if self.args else "")


class PolicyNotFoundError(ColumnNotFoundError):
    """Unknown policy id."""


class ColumnLengthError(SampleBatchError, ValueError):
    """A column's number of rows differs from the number of rows of the batch."""


class ColumnTypeError(SampleBatchError, TypeError):
    """A value or dtype that no column type supports."""


class ColumnMismatchError(SampleBatchError, ValueError):
    """Names, dtypes or row shapes of batches differ."""


class ArgumentError(SampleBatchError, ValueError):
    """An argument has an invalid value, such as a fractional count, a discount above 1 or an unknown option."""


class RowIndexError(SampleBatchError, IndexError):
    """A row index is out of range, or a key selects no rows."""


class SequenceError(SampleBatchError, ValueError):
    """The sequence lengths, padding or time layout of a batch prevent an operation."""


class PriorityError(SampleBatchError, ValueError):
    """A weight or priority is not a non-negative finite number, or the weights prevent sampling."""


class CompressedColumnError(SampleBatchError, ValueError):
    """Compressed blocks do not decompress to the declared rows."""


class FormatError(SampleBatchError, ValueError):
    """Bytes from a file or another process violate their format."""


class UntrustedPickleError(SampleBatchError, ValueError):
    """Reading data requires unpickling, which the caller has not permitted."""


class UnstorableError(SampleBatchError, NotImplementedError):
    """A value can be neither represented by a file format nor pickled into the file."""


class DeviceError(SampleBatchError, ValueError):
    """Torch cannot use a device on this machine, or device memory is passed where host memory is required."""


class SharedMemoryError(SampleBatchError, MemoryError):
    """Shared memory cannot be allocated because of insufficient memory, a resource limit or the file system."""


class StorageError(SampleBatchError, OSError):
    """A buffer's folder cannot be used, because the buffer is closed or open elsewhere, or the disk is full."""


class EmptyBufferError(SampleBatchError, ValueError):
    """A buffer has no rows to sample."""


class RingError(SampleBatchError, ValueError):
    """A buffer lacks the requested rings, or an interval spans several rings."""


class CapacityError(SampleBatchError, ValueError):
    """A batch exceeds the capacity of a channel or a buffer, or a size limit."""


class ChannelTimeoutError(SampleBatchError, TimeoutError):
    """The timeout elapsed before a channel had space to send a batch, or before a batch arrived."""


class ChannelClosedError(SampleBatchError, BrokenPipeError):
    """A closed end of a channel is used, or a batch is sent to a consumer that has been closed."""


class EndOfStreamError(SampleBatchError, EOFError):
    """The producer has closed its end, and all batches have been received."""


class PeerDiedError(SampleBatchError, ConnectionError):
    """The process at the other end of a channel died without closing its end."""


class NonFiniteLossError(SampleBatchError, FloatingPointError):
    """A loss is NaN or infinite, so a gradient step would make the weights non-finite."""


class OwnershipError(SampleBatchError, RuntimeError):
    """An object of one process, such as an end of a channel or a replay client, is used in another process."""


class LeaseError(SampleBatchError, BufferError):
    """Arrays, slices or tensors of a leased batch still exist at the end of the lease."""


class ReleasedError(SampleBatchError, ValueError):
    """A reservation is used after it was sent or cancelled."""


class EnvironmentSpecError(SampleBatchError, ValueError):
    """An environment cannot be created or stepped as requested."""


class PolicySpecError(SampleBatchError, ValueError):
    """A policy is not callable or returns invalid actions."""


class WorkerError(SampleBatchError, RuntimeError):
    """A rollout worker raised an error, stopped responding or died."""


class LimitTimeoutError(SampleBatchError, TimeoutError):
    """The rate limit of a replay table blocked an insert or a sample request until the timeout.

    Attributes
    ----------
    why
        Reason why the request was blocked, as a clause.
    since
        Time at which the request was received, as Unix time in seconds.
    """

    def __init__(self, sentence: str, why: str = "", since: float = 0.0) -> None:
        super().__init__(sentence)
        self.why = why
        self.since = since


class TableClosedError(SampleBatchError, RuntimeError):
    """A replay table is closed."""


class AbandonedError(SampleBatchError, RuntimeError):
    """The client of a blocked request to a replay table has disconnected."""


class ServiceError(SampleBatchError, ConnectionError):
    """A replay service cannot be reached, is closed, or fails for an unreported reason."""


class AccessError(SampleBatchError, PermissionError):
    """A replay service rejects a client's missing or wrong token, or a client rejects the service's certificate."""


class MissingExtraError(SampleBatchError, ImportError):
    """An optional dependency is not installed."""


def near_names(name: object, existing: Iterable[object]) -> str:
    """Format a hint for an unknown name: similar names or, if no name is similar, the existing names.

    >>> near_names("reward", ["obs", "rewards"])
    "did you mean 'rewards'?"
    >>> near_names("x", ["obs", "rewards"])
    "there are 'obs', 'rewards'"
    """
    # Ids of policies may be integers. Names from files may have any length.
    names = {str(n): _shorten(repr(n)) for n in existing}
    if not names:
        return "there are none"
    synonyms = [word for group in _SYNONYMS if name in group for word in group if word in names and word != name]
    similar = synonyms or difflib.get_close_matches(str(name)[:_SHOWN], [n for n in names if len(n) <= _SHOWN], n=3)
    if similar:
        return f"did you mean {' or '.join(map(names.__getitem__, similar))}?"
    listed = ", ".join([*names.values()][:12])
    return f"there are {listed}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")


_HEAD, _TAIL = 8000, 2000
"""Number of characters at the beginning and at the end of a long message."""


def _without_middle(message: str) -> str:
    omitted = len(message) - _HEAD - _TAIL
    if omitted <= 0:
        return message
    return f"{message[:_HEAD]} [... {omitted} characters omitted ...] {message[-_TAIL:]}"


_SHOWN: Final = 80
"""Number of characters of a name in an error message."""


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN + 2 else f"{text[:_SHOWN]}..."


_SYNONYMS = (
    ("obs", "observation", "observations", "state", "states"),
    ("obs_next", "new_obs", "next_obs", "next_observation", "next_observations", "next_state", "next_states"),
    ("act", "action", "actions"),
    ("rew", "reward", "rewards"),
    ("terminated", "terminateds", "terminations", "done", "dones"),
    ("truncated", "truncateds", "truncations", "timeouts"),
    ("info", "infos"),
)
"""Names of one column in several libraries."""


def no_such_column(name: object, existing: Iterable[str]) -> ColumnNotFoundError:
    """Create the error for an unknown column; the message lists similar names."""
    return ColumnNotFoundError(f"no column {_shorten(repr(name))}; {near_names(name, existing)}")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module.

    Raises
    ------
    MissingExtraError
        If the module is not installed; the message names the extra that installs the module.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not module.startswith(error.name):
            raise
        raise MissingExtraError(
            f"{module!r} is not installed; install it with: pip install 'samplebatch[{extra}]'"
        ) from error


def require_torch() -> None:
    """Check that torch is installed before a column, a batch or a buffer creates tensors.

    Raises
    ------
    MissingExtraError
        If torch is not installed; the message names the extra that installs torch.
    """
    if "torch" not in sys.modules:
        require("torch", "torch")
