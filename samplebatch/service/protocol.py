"""Protocol: the requests of the replay service, as JSON, and how each is checked before anything is done.

Experience, indices and priorities are Arrow record batches; everything else is small JSON. The page "The replay
service" describes the complete wire format.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final

from samplebatch import errors
from samplebatch.arguments import choice, count_of, fraction, positive, whole
from samplebatch.errors import ArgumentError, CapacityError, FormatError, SampleBatchError, near_names

MAX_REQUEST_NBYTES: Final = 1 << 20
"""Bytes of JSON in a request."""

MAX_NAME_NBYTES: Final = 256
"""Bytes in UTF-8 of a name that a client gives: of a table, a writer, a stream, a key or weights."""

_MAX_SENTENCE: Final = 1000
"""Characters of JSON of a sentence that goes back: gRPC sends it four times in headers of 8 KiB."""

MAX_ASKED: Final = 1024
"""Samples that a request of a session may ask for."""

_MAX_WHOLE: Final = (1 << 63) - 1
"""Largest integer in a request."""

MODES: Final = ("steps", "sequences", "episodes", "fragments")

ACTIONS: Final = {
    "info": "Return the state of the service, or of one table.",
    "checkpoint": "Write all tables to the disk.",
    "reset": "Empty a table.",
    "limits": "Change the limits of a table.",
    "update_weight": "Give rows of a table new priorities.",
    "publish": "Store weights, an Arrow stream, and return their version.",
    "latest": "Return the newest weights, as an Arrow stream.",
    "acknowledged": "Return the number of the last fragment that was inserted from a stream of a writer.",
    "attach": "Return where a client on the same machine finds a secret that proves so.",
}
"""Actions, by their names."""

SAMPLE_KEY: Final = b"samplebatch.sample"
"""Key of a sample's description in the metadata of its schema."""

WEIGHTS_KEY: Final = b"samplebatch.weights"
"""Key of the description of weights in the metadata of their schema."""


class LostError(errors.ServiceError):
    """The connection to a service is gone, and nobody knows how far a call got: a link makes another one."""


def write_json(values: Mapping[str, Any]) -> bytes:
    """Write a request or an answer.

    >>> write_json({"table": "replay"})
    b'{"table":"replay"}'
    """
    return json.dumps(values, separators=(",", ":")).encode()


def read_json(raw: Any, about: str) -> dict[str, Any]:
    """Read an answer of the service.

    - `raw`: its bytes, or anything with the buffer protocol.
    - `about`: the answer, for errors: `"an acknowledgement"`.

    Raises CapacityError if there are more bytes than a request may have. Raises FormatError if it is no JSON object.

    >>> read_json(b"[]", "an answer")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: an answer must be a JSON object, it is not
    """
    return _read_object(raw, about, int)


def read_request(raw: Any, about: str) -> dict[str, Any]:
    """Read a request of a client: as `read_json`, with integers that NumPy and Arrow can represent.

    Raises CapacityError and FormatError as `read_json` does; FormatError also if an integer has more than 64 bits.

    >>> read_request(b'{"n_step": 9223372036854775808}', "the ticket")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: the ticket must have integers of at most 64 bits, one has 19 digits
    """
    return _read_object(raw, about, _whole_number)


def _read_object(raw: Any, about: str, parse_int: Callable[[str], int]) -> dict[str, Any]:
    message = memoryview(raw)
    if message.nbytes > MAX_REQUEST_NBYTES:
        raise CapacityError(f"{about} must have at most {MAX_REQUEST_NBYTES} bytes, got {message.nbytes}")
    try:
        request = json.loads(bytes(message), parse_int=parse_int)
    except FormatError as error:
        raise FormatError(f"{about} {error}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{about} must be a JSON object, it is not") from error
    if not isinstance(request, dict):
        raise FormatError(f"{about} must be a JSON object, it is not")
    return request


def _whole_number(digits: str) -> int:
    # Count the digits first: converting millions of digits is slow.
    if len(digits) > 20 or abs(int(digits)) > _MAX_WHOLE:
        raise FormatError(f"must have integers of at most 64 bits, one has {len(digits)} digits")
    return int(digits)


def header(token: str) -> str:
    """Return the header by which a call brings a token.

    Raises ArgumentError if the token is empty or has other characters than visible ASCII ones, which no header can
    hold.

    >>> header("sesame")
    'Bearer sesame'
    """
    if not text("token", token) or not all("!" <= letter <= "~" for letter in token):
        raise ArgumentError("token must be a word of visible ASCII characters, it is not")
    return f"Bearer {token}"


def check_names(request: Mapping[str, Any], allowed: Collection[str], about: str) -> None:
    """Reject a request with unknown entries; raises FormatError if there is one; names it, and the near ones."""
    for name in request:
        if name not in allowed:
            raise FormatError(f"{about} must have no entry {name!r}; {near_names(name, allowed)}")


def text(name: str, value: object) -> str:
    """Return a string of a request; raises ArgumentError if it is none."""
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a string, got a {type(value).__name__}")
    return value


def short_text(name: str, value: object) -> str:
    """Return a name that a client gives, which the service may keep.

    Raises ArgumentError if it is no string. Raises CapacityError if it is longer than names may be. Raises FormatError
    if it has no form in UTF-8.

    >>> short_text("writer", "w" * 300)
    Traceback (most recent call last):
    samplebatch.errors.CapacityError: writer must have at most 256 bytes in UTF-8, got 300
    """
    string = text(name, value)
    try:
        size = len(string.encode())
    except UnicodeEncodeError as error:
        raise FormatError(f"{name} must be text in UTF-8, it is not") from error
    if size > MAX_NAME_NBYTES:
        raise CapacityError(f"{name} must have at most {MAX_NAME_NBYTES} bytes in UTF-8, got {size}")
    return string


@dataclass(frozen=True)
class Draw:
    """A request for samples of one kind, as a ticket of DoGet or as the command of a DoExchange.

    - `table`: the table's name.
    - `batch_size`: steps, sequences, episodes or fragments of a sample.
    - `mode`: unit of `batch_size`; None for the table's default.
    - `count`: samples of a DoGet; None for as many as are read.
    - `timeout_s`: seconds that the table's limits may hold a sample back; None for as long as they do.
    - `seed`: seed of the draw; None for the table's own generator.
    - `n_step`, `gamma`, `length`, `burn_in`, `padded`: as for `ReplayBuffer.sample` and
      `ReplayBuffer.sample_sequences`.
    - `unfinished`: as for `ReplayBuffer.sample_episodes`.
    - `beta`: the exponent of importance weights; None for the table's own.
    - `key`: the key of a fragment, of a table that is read by key.
    - `nonce`: the secret that proves that client and service share memory; None to be sent all samples.
    - `ahead`: whether the learner asks for samples before it has the ones before: a large one is sent while the next is
      drawn.

    >>> draw = Draw("replay", 256, n_step=3)
    >>> Draw.read(draw.write(), "the ticket") == draw
    True
    >>> Draw.read(b'{"table": "replay", "batchsize": 2}', "the ticket")
    Traceback (most recent call last):
    samplebatch.errors.FormatError: the ticket must have no entry 'batchsize'; did you mean 'batch_size'?
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
    unfinished: bool | None = None
    beta: float | None = None
    key: str | None = None
    nonce: str | None = None
    ahead: bool | None = None

    def write(self) -> bytes:
        """Write the request, without the fields that are None."""
        return write_json({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def read(cls, raw: Any, about: str) -> Draw:
        """Read a request.

        Raises CapacityError and FormatError as `read_request` does; or if it has other entries than a request. Raises
        ArgumentError if an entry is outside of the values that it may have; names it.
        """
        request = read_request(raw, about)
        check_names(request, [field.name for field in fields(cls)], about)
        if "table" not in request:
            raise FormatError(f"{about} must name a table, it does not")
        for name, value in request.items():
            if value is not None or name in ("table", "batch_size"):
                _CHECKS[name](name, value)
        draw = cls(**request)
        if draw.mode == "sequences" and draw.length is None:
            raise ArgumentError("length must be given for sequences, it is not")
        return draw

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of `ReplayTable.sample` that are given."""
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


_OPTIONS: Final = ("n_step", "gamma", "length", "burn_in", "padded", "unfinished", "beta", "key")

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
"""How each entry of a `Draw` and of a `Fragment` is checked."""


@dataclass(frozen=True)
class Fragment:
    """The metadata of a fragment that a writer puts, beside its rows.

    - `number`: sequence number in the writer's stream, from 1 on; 0 for none. A fragment whose number is not above the
      last inserted one was sent again, and is only acknowledged.
    - `timeout_s`: seconds that the table's limits may hold it back; None for as long as they do.
    - `key`: its key, for a table that is read by key.
    - `priority`: its priority, for a table of fragments that looks at priorities.
    - `batch`: the batch's description in the schema metadata if it differs from the one at the start of the stream;
      None if it is the same.
    - `update`: for a table of rows, whether all keys must exist, or none; None for either.

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
        """Write the metadata, without the fields that are None."""
        return write_json({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def read(cls, raw: Any) -> Fragment:
        """Read the metadata; None is read as no metadata.

        Raises CapacityError, FormatError and ArgumentError as `Draw.read` does.
        """
        if raw is None:
            return cls()
        request = read_request(raw, "the metadata of a fragment")
        check_names(request, [field.name for field in fields(cls)], "the metadata of a fragment")
        for name, value in request.items():
            if value is not None or name == "number":
                _CHECKS[name](name, value)
        return cls(**request)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Describe an error for the other side: its class, its sentence, and its attributes that are plain.

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
    """Write the description of an error."""
    return write_json(describe_error(error))


def read_error(answer: Mapping[str, Any]) -> SampleBatchError:
    """Make the error that the other side has written, of the same class where the library has it.

    Tables are closed by a service that ends, so this is a lost connection: another one may follow.

    >>> read_error({"error": "EmptyBufferError", "message": "a buffer must have rows"})
    EmptyBufferError('a buffer must have rows')
    """
    cls = vars(errors).get(str(answer.get("error")))
    if cls is errors.TableClosedError:
        cls = LostError
    if not (isinstance(cls, type) and issubclass(cls, SampleBatchError)):
        cls = errors.ServiceError
    # Not called: some classes have further arguments, which are among the attributes.
    error: SampleBatchError = cls.__new__(cls)
    error.args = (str(answer.get("message")),)
    attributes = answer.get("attributes")
    vars(error).update(attributes if isinstance(attributes, dict) else {})
    return error


MAX_STREAMS: Final = 1 << 16
"""Maximum number of streams whose last fragment a table remembers."""


class TakenNumbers:
    """Sequence number of the last inserted fragment of each stream, for `ReplayTable`.

    Fragments of a stream arrive in the order of their numbers: one whose number is not above the last was sent again.

    >>> taken = TakenNumbers()
    >>> taken.note("actor-0", "a", 1)
    >>> taken.includes("actor-0", "a", 1), taken.includes("actor-0", "a", 2), taken.includes("actor-0", "b", 1)
    (True, False, False)
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], int] = OrderedDict()

    def last(self, writer: str, stream: str) -> int:
        """Return the number of the last inserted fragment of a stream; 0 if there is none."""
        return self._last.get((writer, stream), 0)

    def includes(self, writer: str, stream: str, number: int) -> bool:
        """Return whether a fragment was inserted; False for fragments without a number, 0."""
        return 0 < number <= self.last(writer, stream)

    def note(self, writer: str, stream: str, number: int) -> None:
        """Record an inserted fragment, if it has a number.

        The stream that was silent for the longest time is forgotten, if there are too many.
        """
        if not number:
            return
        self._last[writer, stream] = number
        self._last.move_to_end((writer, stream))
        if len(self._last) > MAX_STREAMS:
            self._last.popitem(last=False)

    def state(self) -> list[list[Any]]:
        """List the writer, the name and the number of each stream, the one that was silent for the longest time first.

        >>> taken = TakenNumbers.from_state([["actor-0", "a", 7]])
        >>> taken.state()
        [['actor-0', 'a', 7]]
        """
        return [[writer, stream, number] for (writer, stream), number in self._last.items()]

    @classmethod
    def from_state(cls, state: Any) -> TakenNumbers:
        """Make the numbers that `state` returned; raises FormatError if they are none."""
        found = cls()
        try:
            for writer, stream, number in state:
                found.note(text("writer", writer), text("stream", stream), count_of("number", number))
        except (TypeError, ValueError) as error:
            raise FormatError("the state must list the number of each stream's last fragment, it does not") from error
        return found
