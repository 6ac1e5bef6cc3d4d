"""Service: the tables and weights of a replay service, which its endpoint serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.errors import ArgumentError, CapacityError, FormatError, near_names
from samplebatch.service.fragment_forms import FragmentDecoder
from samplebatch.service.items import Sample
from samplebatch.service.protocol import Draw, Fragment, check_names, read_request, short_text, write_json
from samplebatch.service.samples import Packed, pack, read_fragment
from samplebatch.service.table import ReplayTable
from samplebatch.service.waiting import Gone
from samplebatch.service.weights import name_of_weights

MAX_WEIGHTS: Final = 64
"""Names that weights can be published under."""


@dataclass(frozen=True)
class Bounds:
    """The sizes that a service holds its clients to.

    Attributes
    ----------
    message_nbytes
        Bytes of a fragment, of a sample, or of weights.
    shared_nbytes
        Bytes of shared memory that the samples of one client may take; those beyond are sent.
    """

    message_nbytes: int = 1 << 30
    shared_nbytes: int = 1 << 28


class Service:
    """The tables and weights of a replay service, for its endpoint; threads may call it at the same time.

    Parameters
    ----------
    tables
        The tables, by their names.
    bounds
        The sizes that clients are held to.
    checkpoint
        Writes all tables to the disk, and returns where; None where the service keeps none.
    """

    def __init__(
        self, tables: Mapping[str, ReplayTable], bounds: Bounds, checkpoint: Callable[[], Any] | None = None
    ) -> None:
        self.tables = dict(tables)
        self.bounds = bounds
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._schemas: dict[str, pa.Schema] = {}
        """Schema of the last fragment that was put, by table."""
        self._weights: dict[str, tuple[int, pa.Buffer]] = {}
        self._actions: dict[str, Callable[[Any], list[Any]]] = {
            "info": self._info,
            "checkpoint": self._write_checkpoint,
            "reset": self._reset,
            "limits": self._set_limits,
            "update_weight": self._update_weight,
            "publish": self._publish,
            "latest": self._latest,
            "acknowledged": self._acknowledged,
        }

    def table(self, name: object) -> ReplayTable:
        """Return a table.

        Raises
        ------
        ArgumentError
            If there is none of that name.
        SampleBatchError
            As `short_text` does.
        """
        found = self.tables.get(short_text("table", name))
        if found is None:
            raise ArgumentError(f"table must be one of the service's, got {name!r}; {near_names(name, self.tables)}")
        return found

    # Fragments

    def insert(
        self,
        table: ReplayTable,
        writer: str,
        stream: str,
        rows: pa.RecordBatch | None,
        fragment: Fragment,
        gone: Gone | None = None,
        decoder: FragmentDecoder | None = None,
    ) -> dict[str, Any]:
        """Insert a fragment, and return its acknowledgement.

        Parameters
        ----------
        table
            Where it goes.
        writer
            Who inserts: its environments have rings of their own.
        stream
            Which of the writer's streams brings it: the fragments of each are numbered by themselves.
        rows, fragment
            Its rows, and what else is said of it.
        gone
            Tells whether the writer is gone; a fragment of it that is held back is dropped then.
        decoder
            Of the fragments of the stream that brings it.

        Raises
        ------
        SampleBatchError
            If it is no fragment, too large, or refused by the table.
        pyarrow.ArrowException
            If its buffers do not fit its schema.
        """
        if rows is None:
            raise FormatError("a fragment must have rows, this message has none")
        self.check_nbytes("a fragment", rows.nbytes)
        found = (decoder or FragmentDecoder()).decode(rows, fragment.batch)
        priorities: Any = fragment.priority
        if not isinstance(found, MultiAgentBatch) and names.PRIORITY in found:
            priorities = found.pop(names.PRIORITY)
        result = table.insert(
            found,
            writer=writer,
            stream=stream,
            number=fragment.number,
            priorities=priorities,
            keys=fragment.key,
            timeout=fragment.timeout_s,
            gone=gone,
        )
        self._schemas[table.name] = rows.schema
        return {"number": fragment.number, "inserted": result.inserted, "held_s": result.held_s, "size": result.size}

    def schema(self, table: str) -> pa.Schema:
        """Return the schema of the last fragment of a table; an empty one if there is none yet."""
        return self._schemas.get(table, pa.schema([]))

    # Samples

    def sample(self, draw: Draw, reader: str = "", gone: Gone | None = None) -> Sample:
        """Draw a sample.

        Raises
        ------
        SampleBatchError
            If the table refuses, or the sample would be too large.
        """
        table = self.table(draw.table)
        self.check_nbytes("a sample", draw.batch_size * (draw.length or 1) * table.item_nbytes)
        mode: Any = draw.mode
        return table.sample(
            draw.batch_size,
            mode=mode,
            timeout=draw.timeout_s,
            seed=draw.seed,
            reader=reader,
            gone=gone,
            **draw.options,
        )

    def pack(self, sample: Sample) -> Packed:
        """View a sample as a record batch; raises as `pack` does, or if it is too large."""
        packed = pack(sample)
        self.check_nbytes("a sample", packed.batch.nbytes)
        return packed

    def update(self, table: ReplayTable, rows: pa.RecordBatch, *, any_generation: bool = False) -> int:
        """Give rows new priorities: columns `batch_indexes`, `priority` and `generation`, which may be ignored.

        Raises
        ------
        SampleBatchError
            If columns are missing or are no numbers, or the table refuses.
        pyarrow.ArrowException
            If the buffers do not fit the schema.
        """
        self.check_nbytes("an update", rows.nbytes)
        rows.validate()
        found = read_fragment(rows)
        if isinstance(found, MultiAgentBatch):
            raise FormatError("an update must have columns of numbers, it has policies")
        generations = None if any_generation else found[names.GENERATION]
        return table.update_weight(found[names.BATCH_INDEXES], found[names.PRIORITY], generations)

    def check_nbytes(self, about: str, nbytes: int) -> None:
        """Refuse a message that is larger than the service sends and takes.

        Raises
        ------
        CapacityError
            If it is.
        """
        if nbytes > self.bounds.message_nbytes:
            raise CapacityError(f"{about} must have at most {self.bounds.message_nbytes} bytes, this one has {nbytes}")

    # Actions

    def act(self, action: str, body: Any) -> list[Any]:
        """Carry out an action, and return the bodies of its results.

        Raises
        ------
        ArgumentError
            If there is no such action.
        SampleBatchError
            If it fails.
        """
        found = self._actions.get(action)
        if found is None:
            raise ArgumentError(f"there is no action {action!r}; {near_names(action, self._actions)}")
        return found(body)

    def _info(self, body: Any) -> list[bytes]:
        request = _read(body, "info", ("table",))
        if "table" in request:
            return [write_json(self.table(request["table"]).info())]
        with self._lock:
            weights = {name: version for name, (version, _) in self._weights.items()}
        return [write_json({"tables": {name: one.info() for name, one in self.tables.items()}, "weights": weights})]

    def _write_checkpoint(self, body: Any) -> list[bytes]:
        _read(body, "checkpoint", ())
        if self._checkpoint is None:
            raise ArgumentError("the service must have a folder for checkpoints to write one, it has none")
        return [write_json({"path": str(self._checkpoint())})]

    def _reset(self, body: Any) -> list[bytes]:
        self.table(_read(body, "reset", ("table",)).get("table")).reset()
        return [write_json({})]

    def _set_limits(self, body: Any) -> list[bytes]:
        request = read_request(body, "the action 'limits'")
        table = self.table(request.pop("table", None))
        table.set_limits(**request)
        return [write_json(table.info())]

    def _update_weight(self, body: Any) -> list[bytes]:
        request = _read(body, "update_weight", ("table", "indices", "priorities", "generations"))
        table = self.table(request.get("table"))
        lists = [request.get(name) for name in ("indices", "priorities", "generations")]
        arrays = [None if one is None else _numbers(one) for one in lists]
        if arrays[0] is None or arrays[1] is None:
            raise FormatError("an update must have lists of indices and priorities, one is missing")
        return [write_json({"updated": table.update_weight(*arrays)})]

    def _publish(self, body: Any) -> list[bytes]:
        self.check_nbytes("weights", memoryview(body).nbytes)
        name = short_text("name", name_of_weights(body))
        with self._lock:
            version = self._weights[name][0] + 1 if name in self._weights else 1
            if version == 1 and len(self._weights) >= MAX_WEIGHTS:
                raise CapacityError(f"weights must have one of {MAX_WEIGHTS} names, {name!r} would be one more")
            self._weights[name] = version, pa.py_buffer(body)
        return [write_json({"version": version})]

    def _latest(self, body: Any) -> list[Any]:
        request = _read(body, "latest", ("name", "newer_than"))
        name, known = short_text("name", request.get("name", "")), whole("newer_than", request.get("newer_than", 0))
        with self._lock:
            version, weights = self._weights.get(name, (0, None))
        answer = write_json({"version": version})
        return [answer] if weights is None or version <= known else [answer, weights]

    def _acknowledged(self, body: Any) -> list[bytes]:
        request = _read(body, "acknowledged", ("table", "writer", "stream"))
        table = self.table(request.get("table"))
        writer, stream = (short_text(own, request.get(own, "")) for own in ("writer", "stream"))
        return [write_json({"number": table.taken(writer, stream)})]

    def close(self) -> None:
        """Let all who wait at a table raise."""
        for table in self.tables.values():
            table.close()


def _read(body: Any, action: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Read the request of an action; an empty body stands for an empty request."""
    about = f"the action {action!r}"
    request = read_request(body, about) if memoryview(body).nbytes else {}
    check_names(request, known, about)
    return request


def _numbers(values: Any) -> Any:
    """Return a list of numbers of a request as an array."""
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise FormatError("an update must have lists of numbers, one has others") from error
    if found.ndim != 1 or (found.dtype.kind not in "iuf" and found.size):
        raise FormatError("an update must have lists of numbers, one has others")
    return found
