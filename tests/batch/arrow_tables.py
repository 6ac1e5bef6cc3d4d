"""Helpers for tests of Arrow tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import polars as pl
import pyarrow as pa

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.batch.arrow import METADATA_KEY

PICKLED = {"infos mixed", "objects"}
"""Columns of `every_kind` whose rows have no one form, so that Arrow holds pickles of them."""


def through_ipc(table: pa.Table) -> pa.Table:
    """Write a table as an Arrow stream and read it back over the written bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def tampered(table: pa.Table, change: Callable[[dict[str, Any]], Any]) -> pa.Table:
    """Return a table whose metadata has been changed."""
    about = json.loads(table.schema.metadata[METADATA_KEY])
    changed = change(about)
    about = about if changed is None else changed
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(about).encode()})


def address(array: pa.Array) -> int:
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    while not pa.types.is_primitive(array.type) and not pa.types.is_fixed_size_binary(array.type):
        array = array.values
    return int(array.buffers()[1].address) + array.offset * array.type.byte_width


def as_frame(batch: SampleBatch | MultiAgentBatch) -> pl.DataFrame:
    """Read a batch with Polars, which returns a frame or a series of structs, depending on its version."""
    restored = pl.from_arrow(batch)
    return restored if isinstance(restored, pl.DataFrame) else restored.struct.unnest()
