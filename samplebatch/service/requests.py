"""RequestHandler: handler of client requests to a replay service, independent of Flight."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.column.memory import check_rows
from samplebatch.errors import ArgumentError, CapacityError, FormatError, SampleBatchError, StorageError, near_names
from samplebatch.service.fragments import FragmentDecoder, read_fragment
from samplebatch.service.items import Sample
from samplebatch.service.limiter import IsCancelled
from samplebatch.service.protocol import Draw, Fragment, check_names, read_request, short_text, write_json
from samplebatch.service.row_table import RowTable
from samplebatch.service.samples import Packed, pack
from samplebatch.service.table import ReplayTable
from samplebatch.service.weights import PublishedWeights

MAX_STEPS: Final = 1 << 20
"""Maximum number of steps (including padding) or episodes per sample, and of steps per priority update."""

MAX_FRAGMENTS: Final = 1 << 16
"""Maximum number of fragments per sample or priority update."""

MAX_WINDOW_STEPS: Final = 1 << 28
"""Maximum total length of the n-step windows of a sample, in steps."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """Maximum sizes of requests and answers.

    - `message_nbytes`: maximum size of a fragment, of a sample, of a priority update, or of weights, in bytes.
    - `shared_nbytes`: maximum shared memory for the samples of one client, in bytes; samples that exceed this total
      size are sent in messages.
    """

    message_nbytes: int = 1 << 30
    shared_nbytes: int = 1 << 28


class RequestHandler:
    """Handler of requests to the tables and weights of a replay service; thread-safe.

    - `tables`: tables by name.
    - `bounds`: maximum sizes of requests and answers.
    - `checkpoint`: function that writes a checkpoint and returns its path; None for a service without checkpoints.
    - `weights`: published weights of the service; None for an empty collection.
    """

    def __init__(
        self,
        tables: Mapping[str, ReplayTable | RowTable],
        bounds: Bounds,
        checkpoint: Callable[[], Any] | None = None,
        weights: PublishedWeights | None = None,
    ) -> None:
        self.tables = dict(tables)
        self.bounds = bounds
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._schemas: dict[str, pa.Schema] = {}
        """Schema of the last inserted fragment by table."""
        self.weights = PublishedWeights() if weights is None else weights
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

    def replay_table(self, name: object) -> ReplayTable:
        """Return the table of steps or fragments with a given name.

        Raises ArgumentError if the table is a row table. Raises the same errors as `table`.
        """
        table = self.table(name)
        if isinstance(table, RowTable):
            raise ArgumentError(f"table {table.name!r} must contain steps or fragments, got rows; use a RowClient")
        return table

    def table(self, name: object) -> ReplayTable | RowTable:
        """Return the table with a given name.

        Raises ArgumentError if the service has no table of that name. Raises SampleBatchError in the same cases as
        `short_text`.
        """
        table = self.tables.get(short_text("table", name))
        if table is None:
            raise ArgumentError(f"table must be a table of the service, got {name!r}; {near_names(name, self.tables)}")
        return table

    # Fragments

    def insert(
        self,
        table: ReplayTable | RowTable,
        writer: str,
        stream: str,
        rows: pa.RecordBatch | None,
        fragment: Fragment,
        is_cancelled: IsCancelled | None = None,
        decoder: FragmentDecoder | None = None,
    ) -> dict[str, Any]:
        """Insert a fragment; return its acknowledgement.

        - `table`: table for the fragment.
        - `writer`: name of the writer, which determines the rings of the fragment's steps.
        - `stream`: name of the writer's stream; each stream numbers its fragments separately.
        - `rows`, `fragment`: rows and metadata of the fragment.
        - `is_cancelled`: function that returns whether the writer has disconnected; a blocked fragment is then
          discarded.
        - `decoder`: decoder of the stream's fragments; None for a new decoder.

        Raises SampleBatchError if the rows are not a fragment, are too large, or are rejected by the table. Raises
        pyarrow.ArrowException if the buffers of the rows do not match their schema.
        """
        if rows is None:
            raise FormatError("a fragment must have rows, got a message without rows")
        decoder = decoder or FragmentDecoder()
        nbytes = decoder.nbytes_of(rows)
        self.check_nbytes("a fragment", nbytes)
        check_rows(rows.num_rows, nbytes, "a fragment")
        batch = decoder.decode(rows, fragment.batch)
        if isinstance(table, RowTable):
            return self._put(table, writer, stream, batch, fragment, rows.schema, is_cancelled)
        priorities: Any = fragment.priority
        if not isinstance(batch, MultiAgentBatch) and names.PRIORITY in batch:
            priorities = batch.pop(names.PRIORITY)
        result = table.extend(
            batch,
            writer=writer,
            stream=stream,
            number=fragment.number,
            priorities=priorities,
            keys=fragment.key,
            timeout_s=fragment.timeout_s,
            is_cancelled=is_cancelled,
        )
        self._schemas[table.name] = rows.schema
        return {"number": fragment.number, "inserted": result.inserted, "held_s": result.held_s, "size": result.size}

    def _put(
        self,
        table: RowTable,
        writer: str,
        stream: str,
        columns: Any,
        fragment: Fragment,
        schema: pa.Schema,
        is_cancelled: IsCancelled | None,
    ) -> dict[str, Any]:
        """Store rows under the keys in column `key`; return the acknowledgement."""
        if isinstance(columns, MultiAgentBatch):
            raise FormatError("columns of rows must be of one policy, got several policies")
        for name, value in (("key", fragment.key), ("priority", fragment.priority)):
            if value is not None:
                raise ArgumentError(
                    f"{name} must not be passed with rows, got {value!r}; a column 'key' has their keys"
                )
        stored = table.put(
            None,
            columns,
            update=fragment.update,
            writer=writer,
            stream=stream,
            number=fragment.number,
            timeout_s=fragment.timeout_s,
            is_cancelled=is_cancelled,
        )
        self._schemas[table.name] = schema
        return {"number": fragment.number, "inserted": len(stored)}

    def schema(self, table: str) -> pa.Schema:
        """Return the schema of the last fragment inserted into a table, or an empty schema before the first insert."""
        return self._schemas.get(table, pa.schema([]))

    # Samples

    def sample(self, draw: Draw, reader: str = "", is_cancelled: IsCancelled | None = None) -> Sample:
        """Draw a sample.

        Raises SampleBatchError if the table rejects the request, or if the sample would exceed the maximum message
        size.
        """
        table = self.replay_table(draw.table)
        self._check_items(table, "a sample", draw.batch_size * (draw.length or 1))
        if table.unit == "steps":
            # The cost of an n-step sample is proportional to the total length of its windows.
            window = table.capacity if draw.n_step is None else min(draw.n_step, table.capacity)
            if draw.n_step is not None and draw.batch_size * window > MAX_WINDOW_STEPS:
                raise CapacityError(
                    f"a sample must read at most {MAX_WINDOW_STEPS} steps, got {draw.batch_size} windows of {window} "
                    "steps"
                )
        mode: Any = draw.mode
        return table.sample(
            draw.batch_size,
            mode=mode,
            timeout_s=draw.timeout_s,
            seed=draw.seed,
            reader=reader,
            is_cancelled=is_cancelled,
            max_nbytes=self.bounds.message_nbytes,
            **draw.options,
        )

    def pack(self, sample: Sample) -> Packed:
        """View a sample as a record batch.

        Raises CapacityError if the record batch exceeds the maximum size of a message. Raises the same errors as
        `samples.pack`.
        """
        packed = pack(sample)
        self.check_nbytes("a sample", packed.batch.nbytes)
        return packed

    def update(self, table: ReplayTable, rows: pa.RecordBatch, *, any_generation: bool = False) -> int:
        """Set new priorities of items; return the number of items that still exist.

        - `table`: table of the items.
        - `rows`: columns `batch_indexes`, `priority` and, unless `any_generation` is true, `generation`.
        - `any_generation`: whether to ignore the generations, so that overwritten rows are updated too.

        Raises SampleBatchError if a column is missing or not numeric, or the table rejects the update. Raises
        pyarrow.ArrowException if the buffers of the rows do not match their schema.
        """
        self.check_nbytes("an update", rows.nbytes)
        rows.validate()
        update = read_fragment(rows)
        if isinstance(update, MultiAgentBatch):
            raise FormatError("an update must have columns of numbers, got a batch of policies")
        self._check_items(table, "an update", rows.num_rows)
        generations = None if any_generation else update[names.GENERATION]
        return table.update_weight(update[names.BATCH_INDEXES], update[names.PRIORITY], generations)

    @staticmethod
    def _check_items(table: ReplayTable, about: str, count: int) -> None:
        """Reject a request with too many items, because the table's lock is held during the request."""
        max_items = MAX_STEPS if table.unit == "steps" else MAX_FRAGMENTS
        if count > max_items:
            raise CapacityError(f"{about} must have at most {max_items} {table.unit}, got {count}")

    def check_nbytes(self, about: str, nbytes: int) -> None:
        """Raise CapacityError if a message exceeds the maximum size."""
        if nbytes > self.bounds.message_nbytes:
            raise CapacityError(f"{about} must have at most {self.bounds.message_nbytes} bytes, got {nbytes}")

    # Actions

    def act(self, action: str, body: Any) -> list[Any]:
        """Perform an action; return the bodies of its results.

        Raises ArgumentError if the action is unknown. Raises SampleBatchError if the action fails.
        """
        act = self._actions.get(action)
        if act is None:
            raise ArgumentError(f"action must be known, got {action!r}; {near_names(action, self._actions)}")
        return act(body)

    def _info(self, body: Any) -> list[bytes]:
        request = _read(body, "info", ("table",))
        if "table" in request:
            return [write_json(self.table(request["table"]).info())]
        tables = {name: table.info() for name, table in self.tables.items()}
        return [write_json({"tables": tables, "weights": self.weights.versions()})]

    def _write_checkpoint(self, body: Any) -> list[bytes]:
        _read(body, "checkpoint", ())
        if self._checkpoint is None:
            raise ArgumentError("the service must have a folder for checkpoints to write a checkpoint, got None")
        try:
            path = self._checkpoint()
        except SampleBatchError:
            raise
        except Exception as error:
            _log.exception("a checkpoint was not written")
            cause = str(error).partition("\n")[0]
            raise StorageError(f"a checkpoint cannot be written: {type(error).__name__}: {cause}") from error
        return [write_json({"path": str(path)})]

    def _reset(self, body: Any) -> list[bytes]:
        self.table(_read(body, "reset", ("table",)).get("table")).reset()
        return [write_json({})]

    def _set_limits(self, body: Any) -> list[bytes]:
        request = read_request(body, "the action 'limits'")
        table = self.replay_table(request.pop("table", None))
        table.set_limits(**request)
        return [write_json(table.info())]

    def _update_weight(self, body: Any) -> list[bytes]:
        request = _read(body, "update_weight", ("table", "indices", "priorities", "generations"))
        table = self.replay_table(request.get("table"))
        lists = [request.get(name) for name in ("indices", "priorities", "generations")]
        arrays = [None if values is None else _numbers(values) for values in lists]
        if arrays[0] is None or arrays[1] is None:
            raise FormatError(f"an update must have the entries 'indices' and 'priorities', got {sorted(request)}")
        self._check_items(table, "an update", len(arrays[0]))
        return [write_json({"updated": table.update_weight(*arrays)})]

    def _publish(self, body: Any) -> list[bytes]:
        self.check_nbytes("weights", memoryview(body).nbytes)
        newest = self.weights.publish(body)
        for table in self.tables.values():
            if isinstance(table, RowTable):
                table.set_version(newest.version)
        return [write_json({"version": newest.version, "epoch": newest.epoch})]

    def _latest(self, body: Any) -> list[Any]:
        request = _read(body, "latest", ("name", "newer_than", "epoch", "version_only"))
        name = short_text("name", request.get("name", ""))
        newer_than = whole("newer_than", request.get("newer_than", 0))
        epoch = None if request.get("epoch") is None else short_text("epoch", request["epoch"])
        newest = self.weights.latest(name)
        if newest is None:
            return [write_json({"version": 0})]
        answer = write_json({"version": newest.version, "epoch": newest.epoch})
        # A larger version or another epoch was published before the service restarted.
        has_restarted = newer_than > newest.version if epoch is None else epoch != newest.epoch
        is_newer = newest.version > newer_than or has_restarted
        return [answer, newest.stream] if is_newer and request.get("version_only") is not True else [answer]

    def _acknowledged(self, body: Any) -> list[bytes]:
        request = _read(body, "acknowledged", ("table", "writer", "stream"))
        table = self.table(request.get("table"))
        writer, stream = (short_text(entry, request.get(entry, "")) for entry in ("writer", "stream"))
        return [write_json({"number": table.taken(writer, stream)})]

    def close(self) -> None:
        """Close the tables, so that all blocked requests raise TableClosedError."""
        for table in self.tables.values():
            table.close()


def _read(body: Any, action: str, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Read the entries of an action's request; an empty body is a request without entries."""
    about = f"the action {action!r}"
    request = read_request(body, about) if memoryview(body).nbytes else {}
    check_names(request, allowed, about)
    return request


def _numbers(values: Any) -> Any:
    try:
        numbers = np.asarray(values)
    except ValueError as error:
        raise FormatError(f"an update must have lists of numbers: {error}") from error
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iuf" and numbers.size):
        raise FormatError(f"an update must have lists of numbers, got {numbers.ndim} axes of {numbers.dtype}")
    return numbers
