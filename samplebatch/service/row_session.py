"""RowSession: server side of one client's requests to a table of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import AbandonedError, ArgumentError, FormatError, SampleBatchError, near_names
from samplebatch.service.fragments import as_record_batch, read_fragment
from samplebatch.service.protocol import check_names, describe_error, read_request, short_text, write_json
from samplebatch.service.requests import RequestHandler
from samplebatch.service.row_store import KEY, list_keys
from samplebatch.service.row_table import Lease, RowTable, Selection
from samplebatch.service.samples import RowsStream, SampleMemory, inline

_OPTIONS: Final = ("columns", "at_least", "by_group", "max_tokens", "max_lag")


class RowSession:
    """Requests of one client to a table of rows, answered in order.

    Taken rows are leased until the client confirms receipt, and returned otherwise.

    Parameters
    ----------
    service, table
        The service and its table.
    writer
        Stream of answers.
    memory
        Shared memory for rows; None to send them inline.
    context
        Flight's call context.
    """

    def __init__(
        self, service: RequestHandler, table: RowTable, writer: Any, memory: SampleMemory | None, context: Any
    ) -> None:
        self._service, self._table, self._writer = service, table, writer
        self._memory, self._context = memory, context
        self._lease: Lease | None = None
        self._answers: dict[str, Callable[[dict[str, Any], Any], None]] = {
            "take": self._take,
            "commit": self._commit,
            "settle": self._settle,
            "wait": self._wait,
            "sample": self._sample,
            "get": self._get,
            "remove": self._remove,
            "reserve": self._reserve,
        }

    def __enter__(self) -> RowSession:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lease is not None:
            self._table.release(self._lease)
        if self._memory is not None:
            self._memory.close()

    def answer(self, chunk: Any) -> None:
        """Answer one request. An error is sent as an answer, and the session continues."""
        try:
            request = read_request(chunk.app_metadata or b"", "the request")
            keys = None if chunk.data is None else self._read_keys(chunk.data)
            ask = request.pop("ask", None)
            if ask is None:
                raise ArgumentError(
                    f"table {self._table.name!r} must hold steps or fragments, got rows; use a RowClient"
                )
            if ask not in self._answers:
                raise FormatError(f"the request must ask for an action, got {ask!r}; {near_names(ask, self._answers)}")
            self._answers[ask](request, keys)
        except AbandonedError:
            raise
        except (SampleBatchError, pa.ArrowInvalid) as error:
            ours = error if isinstance(error, SampleBatchError) else FormatError(f"keys must be Arrow data: {error}")
            self._write_answer(describe_error(ours))

    def _read_keys(self, rows: pa.RecordBatch) -> Any:
        """Return the keys attached to a request.

        Raises
        ------
        SampleBatchError
            If the data are not keys or exceed the size limit.
        pyarrow.ArrowInvalid
            If the buffers do not fit the schema.
        """
        self._service.check_nbytes("keys", rows.nbytes)
        rows.validate()
        batch = read_fragment(rows)
        if isinstance(batch, MultiAgentBatch) or list(batch.column_names) != [KEY]:
            raise FormatError(f"keys must be one column {KEY!r}, got others")
        return list_keys(batch._all()[KEY])

    # Requests

    def _take(self, request: dict[str, Any], _: Any) -> None:
        check_names(request, ("n", "consumer", "reader", "number", "timeout_s", *_OPTIONS), "the request")
        self._drop_lease()
        number = request.get("number")
        if not isinstance(number, int) or number < 1:
            raise FormatError("the request must have a number of at least 1, got another")
        lease = self._table.lease(
            Selection.of(request.get("n"), request),
            short_text("consumer", request.get("consumer")),
            reader=short_text("reader", request.get("reader")),
            number=number,
            timeout_s=_seconds(request),
            is_cancelled=self._context.is_cancelled,
            max_nbytes=self._service.bounds.message_nbytes,
        )
        self._lease = lease
        try:
            self._send(lease.gather())
        except SampleBatchError:
            self._drop_lease()
            raise

    def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._table.release(lease)

    def _commit(self, request: dict[str, Any], _: Any) -> None:
        check_names(request, (), "the request")
        lease, self._lease = self._lease, None
        self._write_answer({"committed": lease is not None and self._table.commit(lease)})

    def _settle(self, request: dict[str, Any], _: Any) -> None:
        check_names(request, ("reader", "number"), "the request")
        number = request.get("number")
        if not isinstance(number, int):
            raise FormatError("the request must have a number, got none")
        self._write_answer({"committed": self._table.settle(short_text("reader", request.get("reader")), number)})

    def _wait(self, request: dict[str, Any], keys: Any) -> None:
        check_names(request, ("count", "reader", "columns", "timeout_s"), "the request")
        ready_keys = self._table.wait(
            request.get("count", 0) if keys is None else keys,
            columns=request.get("columns"),
            timeout_s=_seconds(request),
            reader=short_text("reader", request.get("reader", "")),
            is_cancelled=self._context.is_cancelled,
        )
        if keys is None:
            self._send(SampleBatch({KEY: ready_keys}))
        else:
            self._write_answer({"ready": len(ready_keys)})

    def _sample(self, request: dict[str, Any], _: Any) -> None:
        check_names(request, ("n", "reader", "seed", "timeout_s", *_OPTIONS), "the request")
        batch = self._table.sample(
            request.pop("n", None),
            timeout_s=_seconds(request),
            seed=request.pop("seed", None),
            reader=short_text("reader", request.pop("reader", "")),
            is_cancelled=self._context.is_cancelled,
            max_nbytes=self._service.bounds.message_nbytes,
            **{name: value for name, value in request.items() if name in _OPTIONS},
        )
        self._send(batch)

    def _get(self, request: dict[str, Any], keys: Any) -> None:
        check_names(request, ("columns",), "the request")
        nbytes = self._service.bounds.message_nbytes
        self._send(self._table.get(_require_keys(keys), columns=request.get("columns"), max_nbytes=nbytes))

    def _remove(self, request: dict[str, Any], keys: Any) -> None:
        check_names(request, (), "the request")
        self._write_answer({"removed": self._table.remove(_require_keys(keys))})

    def _reserve(self, request: dict[str, Any], _: Any) -> None:
        check_names(request, ("count",), "the request")
        self._write_answer({"first": self._table.reserve_keys(request.get("count", 0))})

    # Answers

    def _send(self, batch: SampleBatch[Any]) -> None:
        """Send the shared-memory address of the rows, or the rows inline."""
        stream = RowsStream(as_record_batch(batch.to_arrow()))
        self._service.check_nbytes("rows", stream.nbytes)
        address = None if self._memory is None else self._memory.put(stream)
        if address is not None:
            self._write_answer({"at": address})
        else:
            self._writer.write_metadata(pa.py_buffer(inline([stream])))

    def _write_answer(self, answer: Mapping[str, Any]) -> None:
        self._writer.write_metadata(pa.py_buffer(write_json(answer)))


def _seconds(request: Mapping[str, Any]) -> float | None:
    value = request.get("timeout_s")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
        raise ArgumentError(f"timeout_s must be a number from 0, got {value!r}")
    return None if value is None or np.isinf(value) else value


def _require_keys(keys: Any) -> Any:
    if keys is None:
        raise FormatError("the request must have keys, got none")
    return keys
