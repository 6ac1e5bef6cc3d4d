"""Multi-agent batches as Arrow tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.errors import (
    FormatError,
)
from tests.batch.arrow_tables import PICKLED, as_frame, tampered, through_ipc
from tests.batch.every_kind import every_kind, in_sequences, numbers


@pytest.fixture
def alike() -> MultiAgentBatch:
    return MultiAgentBatch(
        {
            "p": SampleBatch(a=[1, 2], obs={"x": numbers("f4", 2, 3)}, infos=[{"i": 1}, {"i": 2}]),
            "q": SampleBatch(a=[3], obs={"x": numbers("f4", 1, 3)}, infos=[{"i": 3}]),
        },
        env_steps=2,
    )


@pytest.fixture
def unlike() -> MultiAgentBatch:
    columns = {name: values for name, values in every_kind(4).items() if name not in PICKLED}
    return MultiAgentBatch(
        {
            "every kind": SampleBatch(columns),
            "sequences": in_sequences(padded=False),
            "padded": in_sequences(padded=True),
            "one": SampleBatch(a=[1.5], only=np.zeros((1, 2))),
            "nothing": SampleBatch(),
        },
        env_steps=9,
    )


def test_policies_with_equal_columns_share_them(alike: MultiAgentBatch) -> None:
    table = alike.to_arrow()
    table.validate(full=True)
    assert table.column_names == ["policy_id", "a", "obs.x", "infos"]
    assert table["policy_id"].to_pylist() == ["p", "p", "q"]
    assert table["a"].to_pylist() == [1, 2, 3]
    assert MultiAgentBatch.from_arrow(table) == alike


@pytest.mark.parametrize("through", [lambda table: table, through_ipc], ids=["table", "ipc"])
@pytest.mark.parametrize("which", ["alike", "unlike"])
def test_policies_round_trip_exactly(
    which: str, through: Callable[[pa.Table], pa.Table], request: pytest.FixtureRequest
) -> None:
    batch = request.getfixturevalue(which)
    table = through(batch.to_arrow())
    table.validate(full=True)
    restored = MultiAgentBatch.from_arrow(table)
    assert restored == batch
    assert list(restored) == list(batch)
    assert restored.count == batch.count
    for policy, rows in batch.items():
        assert list(restored[policy]) == list(rows)
        assert restored[policy].zero_padded == rows.zero_padded


def test_policies_with_different_columns_store_them_separately(unlike: MultiAgentBatch) -> None:
    table = unlike.to_arrow()
    assert "one/a" in table.column_names
    assert "only" in table.column_names
    assert table["only"].null_count == table.num_rows - 1
    assert table.schema.field("only").nullable
    assert not table.schema.field("policy_id").nullable


def test_no_policy_is_copied(alike: MultiAgentBatch, unlike: MultiAgentBatch) -> None:
    for batch in (alike, unlike):
        restored = MultiAgentBatch.from_arrow(batch.to_arrow())
        for policy, rows in batch.items():
            for name in rows.column_names:
                if rows.column(name).kind == "tensor" and rows.column(name).nbytes and name != "seq_lens":
                    assert np.shares_memory(restored[policy][name], rows[name]), (policy, name)


@pytest.mark.parametrize(
    "policies",
    [
        {},
        {"p": SampleBatch()},
        {"p": SampleBatch(a=np.zeros(0)), "q": SampleBatch(a=np.zeros((0, 3)))},
        {"": SampleBatch(a=[1])},
        {"p/q": SampleBatch(a=[1]), "p": SampleBatch({"q/a": [1.5], "a": ["x"]})},
        {"p": SampleBatch({"x": [1], "p/x": [2]}), "q": SampleBatch(x=[1.5])},
        {"p": SampleBatch(policy_id=[1, 2]), "q": SampleBatch(policy_id=[3])},
        {"p": SampleBatch(policy_id=["x"]), "q": SampleBatch(policy_id=[3])},
        {"p": SampleBatch(infos=[{}, None]), "q": SampleBatch(infos=[{"x": 1}]), "r": SampleBatch(infos=[None])},
    ],
    ids=["none", "empty", "no rows", "no name", "slashes", "clash", "policy_id", "policy_ids", "infos"],
)
def test_unusual_policies_round_trip(policies: dict[str, SampleBatch]) -> None:
    batch = MultiAgentBatch(policies, 3)
    for table in (batch.to_arrow(), through_ipc(batch.to_arrow())):
        assert MultiAgentBatch.from_arrow(table) == batch


def test_other_tools_read_policies(alike: MultiAgentBatch) -> None:
    assert pa.table(alike).equals(alike.to_arrow(), check_metadata=True)
    assert pa.schema(alike) == alike.to_arrow().schema
    frame = as_frame(alike)
    assert frame["a"].to_list() == [1, 2, 3]
    assert frame["policy_id"].cast(pl.String).to_list() == ["p", "p", "q"]
    rows = duckdb.sql("select policy_id, sum(a) from alike group by policy_id order by policy_id").fetchall()
    assert rows == [("p", 3), ("q", 3)]


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.pop("policies"),
        lambda about: about.pop("env_steps"),
        lambda about: about.update(env_steps="many"),
        lambda about: about.update(env_steps=None),
        lambda about: about.update(policies=[]),
        lambda about: about.update(policies={"p": 3}),
        lambda about: about["policies"].pop("q"),
        lambda about: about["policies"]["p"].update(rows=1),
        lambda about: about["policies"]["p"].update(rows=-1),
        lambda about: about["policies"]["p"].update(rows="2"),
        lambda about: about["policies"]["p"].pop("columns"),
        lambda about: about["policies"]["p"]["columns"].update(a="nothing"),
        lambda about: about["policies"]["p"].update(columns=[]),
        lambda about: about["policies"]["p"].pop("flags"),
        lambda about: about.update(type="SampleBatch"),
        lambda about: about.update(version=2),
    ],
)
def test_tampered_metadata_of_policies_is_rejected(
    alike: MultiAgentBatch, change: Callable[[dict[str, Any]], Any]
) -> None:
    with pytest.raises(FormatError):
        MultiAgentBatch.from_arrow(tampered(alike.to_arrow(), change))


def test_tables_of_policies_must_be_complete(alike: MultiAgentBatch) -> None:
    table = alike.to_arrow()
    for changed in (table.slice(1), table.slice(0, 2), pa.concat_tables([table, table]), table.drop_columns(["a"])):
        with pytest.raises(FormatError):
            MultiAgentBatch.from_arrow(changed)
    with pytest.raises(FormatError, match="must contain a MultiAgentBatch, got 'SampleBatch'"):
        MultiAgentBatch.from_arrow(alike["p"].to_arrow())
    with pytest.raises(FormatError, match="must contain a MultiAgentBatch"):
        MultiAgentBatch.from_arrow(pa.table({"a": [1]}))
    with pytest.raises(FormatError, match="must contain a SampleBatch, got a 'MultiAgentBatch'"):
        SampleBatch.from_arrow(table)
