"""Protocol: JSON encoding and validation of the replay service's requests and answers.

Experience and weights are sent as Arrow data. The page `docs/replay-wire.md` describes the complete wire format.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

from samplebatch import errors
from samplebatch.arguments import choice, count_of, fraction, positive, whole
from samplebatch.batch.flags import column_names
from samplebatch.errors import ArgumentError, CapacityError, FormatError, SampleBatchError, near_names

MAX_REQUEST_NBYTES: Final = 1 << 20
"""Maximum size of a request in bytes of JSON."""

MAX_NAME_NBYTES: Final = 256
"""Maximum length of a client's names (table, writer, stream, key, weights) in bytes of UTF-8."""

_MAX_SENTENCE: Final = 1000
"""Maximum length of an error message as JSON: gRPC repeats the message four times in headers of at most 8 KiB."""

MAX_ASKED: Final = 1024
"""Maximum number of samples per request of a session."""

_MAX_WHOLE: Final = (1 << 63) - 1
"""Largest integer in a request."""

MODES: Final = ("steps", "sequences", "episodes", "fragments")

ACTIONS: Final = {
    "info": "Return the state of the service, or of one table.",
    "checkpoint": "Write a checkpoint of all tables.",
    "reset": "Remove all items of a table.",
    "limits": "Change the limits of a table.",
    "update_weight": "Set the priorities of rows in a table.",
    "publish": "Store weights, an Arrow stream, and return their version.",
    "latest": "Return the newest weights as an Arrow stream.",
    "acknowledged": "Return the sequence number of the last inserted fragment of a writer's stream.",
    "attach": "Return the location of a secret that only clients on the same machine can read.",
}
"""Descriptions of actions by name."""

SAMPLE_KEY: Final = b"samplebatch.sample"
"""Key of a sample's description in the metadata of its schema."""

WEIGHTS_KEY: Final = b"samplebatch.weights"
"""Key of the description of weights in the metadata of their schema."""


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


class LostError(errors.ServiceError):
    """Raised when the connection to a service is lost and the outcome of a call is unknown."""


def write_json(values: Mapping[str, Any]) -> bytes:
    """Serialize a request or an answer.

    >>> write_json({"table": "replay"})
    b'{"table":"replay"}'
    """
    return _ENCODER.encode(values).encode()


def read_json(raw: Any, about: str) -> dict[str, Any]:
    """Decode an answer from the service.

    - `raw`: the answer, an object that supports the buffer protocol.
    - `about`: name of the answer in error messages, such as `"an acknowledgement"`.

    Raises CapacityError if the answer has more than `MAX_REQUEST_NBYTES` bytes. Raises FormatError if the answer is not
    a JSON object.

    >>> read_json(b"[]", "an answer")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: an answer must be a JSON object, got a list
    """
    return _read_object(raw, about, _ANSWERS)


def read_request(raw: Any, about: str) -> dict[str, Any]:
    """Decode a client's request.

    Raises CapacityError and FormatError in the same cases as `read_json`. Also raises FormatError if the
    absolute value of an integer exceeds 2**63 - 1.

    >>> read_request(b'{"n_step": 9223372036854775808}', "the ticket")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: the ticket must have integers of at most 64 bits, got
        one of 19 digits
    """
    return _read_object(raw, about, _REQUESTS)


def _read_object(raw: Any, about: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    message = memoryview(raw)
    if message.nbytes > MAX_REQUEST_NBYTES:
        raise CapacityError(f"{about} must have at most {MAX_REQUEST_NBYTES} bytes, got {message.nbytes}")
    try:
        content = bytes(message)
        request = decoder.decode(content.decode(json.detect_encoding(content), "surrogatepass"))
    except FormatError as error:
        raise FormatError(f"{about} {error}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{about} must be a JSON object, got {message.nbytes} bytes of other data") from error
    if not isinstance(request, dict):
        raise FormatError(f"{about} must be a JSON object, got a {type(request).__name__}")
    return request


def _whole_number(digits: str) -> int:
    # Count the digits first: converting millions of digits is slow.
    if len(digits) > 20 or abs(int(digits)) > _MAX_WHOLE:
        raise FormatError(f"must have integers of at most 64 bits, got one of {len(digits)} digits")
    return int(digits)


# Constructing a decoder costs more than decoding a request.
_ANSWERS: Final = json.JSONDecoder()
_REQUESTS: Final = json.JSONDecoder(parse_int=_whole_number)


def header(token: str) -> str:
    """Return the authorization header for a token.

    Raises ArgumentError if the token is empty or contains a character other than visible ASCII.

    >>> header("sesame")
    'Bearer sesame'
    """
    if not text("token", token) or not all("!" <= letter <= "~" for letter in token):
        raise ArgumentError(
            "token must be a non-empty string of visible ASCII characters, got an empty string or other characters"
        )
    return f"Bearer {token}"


def check_names(request: Mapping[str, Any], allowed: Collection[str], about: str) -> None:
    """Reject a request with unknown entries.

    Raises FormatError if an entry is unknown; the message suggests similar names.
    """
    for name in request:
        if name not in allowed:
            raise FormatError(f"{about} must have no entry {name!r}; {near_names(name, allowed)}")


def text(name: str, value: object) -> str:
    """Validate a string in a request; raises ArgumentError if the value is not a string."""
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a string, got a {type(value).__name__}")
    return value


def short_text(name: str, value: object) -> str:
    """Validate a name that a client assigned, before the service stores it.

    Raises ArgumentError if the name is not a string. Raises CapacityError if the name has more than `MAX_NAME_NBYTES`
    bytes in UTF-8. Raises FormatError if the name cannot be encoded as UTF-8.

    >>> short_text("writer", "w" * 300)
    Traceback (most recent call last):
    samplebatch.errors.CapacityError: writer must have at most 256 bytes in UTF-8, got 300
    """
    string = text(name, value)
    try:
        size = len(string.encode())
    except UnicodeEncodeError as error:
        raise FormatError(f"{name} must be encodable as UTF-8, got a surrogate at position {error.start}") from error
    if size > MAX_NAME_NBYTES:
        raise CapacityError(f"{name} must have at most {MAX_NAME_NBYTES} bytes in UTF-8, got {size}")
    return string


@dataclass(frozen=True)
class Draw:
    """Request for samples: the ticket of a DoGet or the command of a DoExchange.

    - `table`: name of the table.
    - `batch_size`: number of steps, sequences, episodes or fragments per sample.
    - `mode`: unit of `batch_size`; None for the table's default.
    - `count`: number of samples that a DoGet streams; None for no limit.
    - `timeout_s`: maximum time in seconds for which the table's limits may block a sample; None for no limit.
    - `seed`: seed of the random selection; None to use the table's random generator.
    - `n_step`, `gamma`, `length`, `burn_in`, `padded`, `per_sequence`: as in `ReplayBuffer.sample` and
      `ReplayBuffer.sample_sequences`.
    - `unfinished`: as in `ReplayBuffer.sample_episodes`.
    - `beta`: exponent of importance weights; None for the table's exponent.
    - `key`: key of the fragment to sample, for a table of kind `"key"`.
    - `nonce`: secret that proves that the client and the service share memory; None to receive all samples in messages.
    - `ahead`: whether the learner prefetches samples; if so, the service sends a large sample while it draws the next
      sample.

    >>> draw = Draw("replay", 256, n_step=3)
    >>> Draw.read(draw.write(), "the ticket") == draw
    True
    >>> Draw.read(b'{"table": "replay", "batchsize": 2}', "the ticket")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: the ticket must have no entry 'batchsize'; did you mean
        'batch_size'?
    """

    table: str
    batch_size: int = 1
    mode: str | None = None
    count: int | None = None
    timeout_s: float | None = None
    seed: int | None = None
    n_step: int | None = None
    gamma: float | None = None
    length: int | None = None
    burn_in: int | None = None
    padded: bool | None = None
    per_sequence: tuple[str, ...] | None = None
    unfinished: bool | None = None
    beta: float | None = None
    key: str | None = None
    nonce: str | None = None
    ahead: bool | None = None

    def write(self) -> bytes:
        """Serialize the fields of the request that are not None."""
        return _write_fields(self, _DRAW_NAMES)

    @classmethod
    def read(cls, raw: Any, about: str) -> Draw:
        """Decode and validate a request.

        Raises CapacityError and FormatError in the same cases as `read_request`. Also raises FormatError if an entry is
        unknown or `table` is missing. Raises ArgumentError if the value of an entry is invalid.
        """
        request = read_request(raw, about)
        check_names(request, _DRAW_NAMES, about)
        if "table" not in request:
            raise FormatError(f"{about} must have the entry 'table', got {sorted(request)}")
        for name, value in request.items():
            if value is not None or name in ("table", "batch_size"):
                request[name] = _CHECKS[name](name, value)
        draw = cls(**request)
        if draw.mode == "sequences" and draw.length is None:
            raise ArgumentError("length must be an integer from 1 for sequences, got None")
        return draw

    @cached_property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `ReplayTable.sample` for the fields that are not None."""
        values = {name: getattr(self, name) for name in _OPTIONS}
        return {name: value for name, value in values.items() if value is not None}


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be true or false, got a {type(value).__name__}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{name} must be a number, got a {type(value).__name__}")
    return float(value)


def _column_names(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, str | list):
        raise ArgumentError(f"{name} must be a list of column names, got a {type(value).__name__}")
    return column_names(name, [short_text(name, each) for each in ([value] if isinstance(value, str) else value)])


_OPTIONS: Final = ("n_step", "gamma", "length", "burn_in", "padded", "per_sequence", "unfinished", "beta", "key")

_CHECKS: Final[dict[str, Any]] = {
    "table": short_text,
    "batch_size": lambda name, value: whole(name, value, 1),
    "mode": lambda name, value: choice(name, value, MODES),
    "count": lambda name, value: whole(name, value, 1),
    "timeout_s": positive,
    "seed": whole,
    "n_step": lambda name, value: whole(name, value, 1),
    "gamma": fraction,
    "length": lambda name, value: whole(name, value, 1),
    "burn_in": whole,
    "padded": _flag,
    "per_sequence": _column_names,
    "unfinished": _flag,
    "beta": _number,
    "key": short_text,
    "nonce": short_text,
    "ahead": _flag,
    "number": whole,
    "priority": _number,
    "batch": text,
    "update": _flag,
}
"""Validators of the entries of `Draw` and `Fragment`, by name."""


@dataclass(frozen=True)
class Fragment:
    """Metadata of a fragment, sent with the fragment's rows.

    - `number`: sequence number in the writer's stream, starting at 1; 0 for a fragment without a number. A fragment is
      a duplicate if its number is not greater than the last inserted number of the stream. Duplicates are acknowledged
      but not inserted.
    - `timeout_s`: maximum time in seconds for which the table's limits may block the insert; None for no limit.
    - `key`: key under which the fragment is stored, for a table of kind `"key"`.
    - `priority`: priority of the fragment, for a prioritized table of fragments.
    - `batch`: description of the batch if it differs from the description at the start of the stream, otherwise None.
    - `update`: condition on the keys of a row table; True if all keys must already exist, False if no key may exist,
      None for no condition.

    >>> Fragment.read(Fragment(3, key="level 1").write()).key
    'level 1'
    """

    number: int = 0
    timeout_s: float | None = None
    key: str | None = None
    priority: float | None = None
    batch: str | None = None
    update: bool | None = None

    def write(self) -> bytes:
        """Serialize the fields of the metadata that are not None."""
        return _write_fields(self, _FRAGMENT_NAMES)

    @classmethod
    def read(cls, raw: Any) -> Fragment:
        """Decode and validate the metadata; None is equivalent to empty metadata.

        Raises CapacityError, FormatError and ArgumentError in the same cases as `Draw.read`.
        """
        if raw is None:
            return cls()
        request = read_request(raw, "the metadata of a fragment")
        check_names(request, _FRAGMENT_NAMES, "the metadata of a fragment")
        for name, value in request.items():
            if value is not None or name == "number":
                request[name] = _CHECKS[name](name, value)
        return cls(**request)


_DRAW_NAMES: Final = tuple(field.name for field in fields(Draw))
_FRAGMENT_NAMES: Final = tuple(field.name for field in fields(Fragment))


def _write_fields(request: Draw | Fragment, field_names: tuple[str, ...]) -> bytes:
    values = [(name, getattr(request, name)) for name in field_names]
    return write_json({name: value for name, value in values if value is not None})


def describe_error(error: BaseException) -> dict[str, Any]:
    """Convert an error to JSON-serializable values: class name, message, and attributes that are strings or numbers.

    >>> describe_error(ArgumentError("there is no action " + "x" * 2000))["message"][-10:]
    'xxxxxx ...'
    """
    plain = {
        name: _shorten(value) if isinstance(value, str) else value
        for name, value in vars(error).items()
        if isinstance(value, str | int | float)
    }
    return {"error": type(error).__name__, "message": _shorten(str(error)), "attributes": plain}


def _shorten(sentence: str) -> str:
    if len(json.dumps(sentence)) <= _MAX_SENTENCE:
        return sentence
    return sentence.encode("ascii", "replace")[: _MAX_SENTENCE // 2].decode() + " ..."


def write_error(error: BaseException) -> bytes:
    """Serialize the result of `describe_error`."""
    return write_json(describe_error(error))


def read_error(answer: Mapping[str, Any]) -> SampleBatchError:
    """Recreate an error from the result of `describe_error`; errors of unknown classes become ServiceError.

    TableClosedError becomes LostError, so that clients reconnect: a service closes its tables when it shuts down.

    >>> read_error({"error": "EmptyBufferError", "message": "a buffer must have rows"})
    EmptyBufferError('a buffer must have rows')
    """
    cls = vars(errors).get(str(answer.get("error")))
    if cls is errors.TableClosedError:
        cls = LostError
    if not (isinstance(cls, type) and issubclass(cls, SampleBatchError)):
        cls = errors.ServiceError
    # The constructor is bypassed: some classes require further arguments, which the attributes contain.
    error: SampleBatchError = cls.__new__(cls)
    error.args = (str(answer.get("message")),)
    attributes = answer.get("attributes")
    vars(error).update(attributes if isinstance(attributes, dict) else {})
    return error


MAX_STREAMS: Final = 1 << 16
"""Maximum number of streams whose last sequence number a table stores."""


class TakenNumbers:
    """Sequence numbers of the last inserted fragments, one per stream, to detect duplicates in a `ReplayTable`.

    Fragments of a stream arrive in ascending order of their numbers. A fragment is therefore a duplicate if its number
    is not greater than the last inserted number of the stream.

    >>> taken = TakenNumbers()
    >>> taken.note("actor-0", "a", 1)
    >>> (
    ...     taken.includes("actor-0", "a", 1),
    ...     taken.includes("actor-0", "a", 2),
    ...     taken.includes("actor-0", "b", 1),
    ... )
    (True, False, False)
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()

    def last(self, writer: str, stream: str) -> int:
        """Return the sequence number of the last inserted fragment of a stream; 0 if the stream is unknown."""
        return self._last.get((writer, stream), 0)

    def includes(self, writer: str, stream: str, number: int) -> bool:
        """Return whether a fragment was already inserted; always False for number 0."""
        return 0 < number <= self.last(writer, stream)

    def note(self, writer: str, stream: str, number: int) -> None:
        """Record the number of an inserted fragment; number 0 is ignored.

        If there are more than `MAX_STREAMS` streams, the least recently active stream is discarded.
        """
        if not number:
            return
        self._last[writer, stream] = number
        self._last.move_to_end((writer, stream))
        if len(self._last) > MAX_STREAMS:
            self._last.popitem(last=False)

    def state(self) -> list[list[Any]]:
        """Return [writer, stream, last number] for each stream, the least recently active stream first.

        >>> taken = TakenNumbers.from_state([["actor-0", "a", 7]])
        >>> taken.state()
        [['actor-0', 'a', 7]]
        """
        return [[writer, stream, number] for (writer, stream), number in self._last.items()]

    @classmethod
    def from_state(cls, state: Any) -> TakenNumbers:
        """Restore the sequence numbers from the result of `state`.

        Raises FormatError if an entry is not a (writer, stream, number) triple.
        """
        numbers = cls()
        try:
            for writer, stream, number in state:
                numbers.note(text("writer", writer), text("stream", stream), count_of("number", number))
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"the state must list [writer, stream, number] of each stream's last fragment: {error}"
            ) from error
        return numbers
