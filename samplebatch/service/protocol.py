"""Protocol: requests of the replay service as JSON, and their validation.

Experience, indices and priorities are Arrow record batches; everything else is small JSON. The page "The replay
service" describes the complete wire format.
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
"""Maximum length of an error message as JSON: gRPC repeats it four times in headers of 8 KiB."""

MAX_ASKED: Final = 1024
"""Maximum number of samples per request of a session."""

_MAX_WHOLE: Final = (1 << 63) - 1
"""Largest integer in a request."""

MODES: Final = ("steps", "sequences", "episodes", "fragments")

ACTIONS: Final = {
    "info": "Return the state of the service, or of one table.",
    "checkpoint": "Write all tables to the disk.",
    "reset": "Empty a table.",
    "limits": "Change the limits of a table.",
    "update_weight": "Set new priorities of rows of a table.",
    "publish": "Store weights, an Arrow stream, and return their version.",
    "latest": "Return the newest weights, as an Arrow stream.",
    "acknowledged": "Return the number of the last inserted fragment of a writer's stream.",
    "attach": "Return the location of a secret that only clients on the same machine can read.",
}
"""Descriptions of actions by name."""

SAMPLE_KEY: Final = b"samplebatch.sample"
"""Key of a sample's description in the metadata of its schema."""

WEIGHTS_KEY: Final = b"samplebatch.weights"
"""Key of the description of weights in the metadata of their schema."""


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


class LostError(errors.ServiceError):
    """The connection to a service was lost, so the outcome of a call is unknown; a `Link` reconnects."""


def write_json(values: Mapping[str, Any]) -> bytes:
    """Serialize a request or an answer.

    >>> write_json({"table": "replay"})
    b'{"table":"replay"}'
    """
    return _ENCODER.encode(values).encode()


def read_json(raw: Any, about: str) -> dict[str, Any]:
    """Read an answer of the service.

    - `raw`: the answer, an object with the buffer protocol.
    - `about`: name of the answer for errors, such as `"an acknowledgement"`.

    Raises CapacityError if the answer has more than `MAX_REQUEST_NBYTES` bytes. Raises FormatError if the answer is not
    a JSON object.

    >>> read_json(b"[]", "an answer")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: an answer must be a JSON object, got a list
    """
    return _read_object(raw, about, _ANSWERS)


def read_request(raw: Any, about: str) -> dict[str, Any]:
    """Read a client's request like `read_json`; integers must fit into 64 bits, as in NumPy and Arrow.

    Raises CapacityError and FormatError in the same cases as `read_json`; also raises FormatError if an integer has
    more than 64 bits.

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
    """Return the authorization header of a token.

    Raises ArgumentError if the token is empty or contains characters that are not visible ASCII, which a header cannot
    represent.

    >>> header("sesame")
    'Bearer sesame'
    """
    if not text("token", token) or not all("!" <= letter <= "~" for letter in token):
        raise ArgumentError(
            "token must be a non-empty string of visible ASCII characters, got an empty or other string"
        )
    return f"Bearer {token}"


def check_names(request: Mapping[str, Any], allowed: Collection[str], about: str) -> None:
    """Reject a request with unknown entries.

    Raises FormatError with near names if an entry is unknown.
    """
    for name in request:
        if name not in allowed:
            raise FormatError(f"{about} must have no entry {name!r}; {near_names(name, allowed)}")


def text(name: str, value: object) -> str:
    """Return a string of a request; raises ArgumentError if the value is not a string."""
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a string, got a {type(value).__name__}")
    return value


def short_text(name: str, value: object) -> str:
    """Validate a name that a client assigned, so that the service may store it.

    Raises ArgumentError if the value is not a string. Raises CapacityError if it has more than `MAX_NAME_NBYTES` bytes.
    Raises FormatError if it cannot be encoded as UTF-8.

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
    - `count`: number of samples of a DoGet; None for no limit.
    - `timeout_s`: maximum seconds for which the table's limits may block a sample; None for no limit.
    - `seed`: seed of the draw; None for the table's generator.
    - `n_step`, `gamma`, `length`, `burn_in`, `padded`, `per_sequence`: as in `ReplayBuffer.sample` and
      `ReplayBuffer.sample_sequences`.
    - `unfinished`: as in `ReplayBuffer.sample_episodes`.
    - `beta`: exponent of importance weights; None for the table's exponent.
    - `key`: key of the fragment, for a table by key.
    - `nonce`: secret that proves that client and service share memory; None to receive all samples in messages.
    - `ahead`: whether the learner requests samples before it has received earlier ones: a large sample is sent while
      the next one is drawn.

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
        """Serialize the request, without the fields that are None."""
        return _write_fields(self, _DRAW_NAMES)

    @classmethod
    def read(cls, raw: Any, about: str) -> Draw:
        """Read a request.

        Raises CapacityError and FormatError in the same cases as `read_request`; also raises FormatError if an entry is
        unknown. Raises ArgumentError if an entry is invalid.
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
            raise ArgumentError("length must be an integer from 1 for sequences, got none")
        return draw

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options for `ReplayTable.sample` that are not None."""
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
"""Validators of the entries of a `Draw` and of a `Fragment`."""


@dataclass(frozen=True)
class Fragment:
    """Metadata of a fragment, sent with its rows.

    - `number`: sequence number in the writer's stream, from 1; 0 for none. A fragment whose number is not greater than
      the last inserted number is a duplicate, and is only acknowledged.
    - `timeout_s`: maximum seconds for which the table's limits may block the fragment; None for no limit.
    - `key`: key of the fragment, for a table by key.
    - `priority`: priority of the fragment, for a table of fragments that uses priorities.
    - `batch`: description of the batch if it differs from the description at the start of the stream, otherwise None.
    - `update`: for a table of rows: True if all keys must exist, False if none may exist, None for no requirement.

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
        """Serialize the metadata, without the fields that are None."""
        return _write_fields(self, _FRAGMENT_NAMES)

    @classmethod
    def read(cls, raw: Any) -> Fragment:
        """Read the metadata; None is read as empty metadata.

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
    """Write the fields of a request that are not None."""
    values = [(name, getattr(request, name)) for name in field_names]
    return write_json({name: value for name, value in values if value is not None})


def describe_error(error: BaseException) -> dict[str, Any]:
    """Describe an error for the peer: class, message and plain attributes.

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
    """Shorten a message that would not fit into gRPC's headers."""
    if len(json.dumps(sentence)) <= _MAX_SENTENCE:
        return sentence
    return sentence.encode("ascii", "replace")[: _MAX_SENTENCE // 2].decode() + " ..."


def write_error(error: BaseException) -> bytes:
    """Serialize the description of an error."""
    return write_json(describe_error(error))


def read_error(answer: Mapping[str, Any]) -> SampleBatchError:
    """Create the error that the peer described, with the same class if it is a library class.

    A service closes its tables when it ends, so TableClosedError becomes a LostError, after which clients reconnect.

    >>> read_error({"error": "EmptyBufferError", "message": "a buffer must have rows"})
    EmptyBufferError('a buffer must have rows')
    """
    cls = vars(errors).get(str(answer.get("error")))
    if cls is errors.TableClosedError:
        cls = LostError
    if not (isinstance(cls, type) and issubclass(cls, SampleBatchError)):
        cls = errors.ServiceError
    # The constructor is bypassed: some classes have further arguments, which are among the attributes.
    error: SampleBatchError = cls.__new__(cls)
    error.args = (str(answer.get("message")),)
    attributes = answer.get("attributes")
    vars(error).update(attributes if isinstance(attributes, dict) else {})
    return error


MAX_STREAMS: Final = 1 << 16
"""Maximum number of streams whose last fragment a table remembers."""


class TakenNumbers:
    """Sequence number of the last inserted fragment of each stream, for `ReplayTable`.

    Fragments of a stream arrive in the order of their numbers: a number that is not greater than the last one
    identifies a duplicate.

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
        """Return the number of the last inserted fragment of a stream, or 0."""
        return self._last.get((writer, stream), 0)

    def includes(self, writer: str, stream: str, number: int) -> bool:
        """Return whether a fragment was inserted; False for fragments without a number, 0."""
        return 0 < number <= self.last(writer, stream)

    def note(self, writer: str, stream: str, number: int) -> None:
        """Record an inserted fragment, if it has a number.

        Beyond `MAX_STREAMS` the least recently active stream is discarded.
        """
        if not number:
            return
        self._last[writer, stream] = number
        self._last.move_to_end((writer, stream))
        if len(self._last) > MAX_STREAMS:
            self._last.popitem(last=False)

    def state(self) -> list[list[Any]]:
        """List writer, name and number of each stream, the least recently active first.

        >>> taken = TakenNumbers.from_state([["actor-0", "a", 7]])
        >>> taken.state()
        [['actor-0', 'a', 7]]
        """
        return [[writer, stream, number] for (writer, stream), number in self._last.items()]

    @classmethod
    def from_state(cls, state: Any) -> TakenNumbers:
        """Restore the result of `state`; raises FormatError if an entry is not a (writer, stream, number) triple."""
        numbers = cls()
        try:
            for writer, stream, number in state:
                numbers.note(text("writer", writer), text("stream", stream), count_of("number", number))
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"the state must list [writer, stream, number] of each stream's last fragment: {error}"
            ) from error
        return numbers
