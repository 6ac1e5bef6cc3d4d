"""Tables from one-word descriptions, as on the command line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.errors import ArgumentError, PriorityError
from samplebatch.service import ReplayTable, RowTable, parse_table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replay=uniform:1e6", {"kind": "uniform", "items": "steps", "capacity": 1_000_000}),
        ("my table=lifo:5", {"name": "my table", "kind": "lifo", "items": "fragments"}),
        ("q=queue:64", {"kind": "fifo", "capacity": 64, "remover": "none"}),
        ("f=uniform:9,items=fragments,remover=lowest_priority", {"items": "fragments", "remover": "lowest_priority"}),
        ("r=uniform:90,streams=4", {"capacity": 92}),
    ],
)
def test_a_description_creates_a_table(text: str, expected: dict[str, Any]) -> None:
    info = parse_table(text).info()
    assert {name: info[name] for name in expected} == expected


def test_limits_are_read_from_the_description() -> None:
    limits = parse_table("r=uniform:1e3,min_size=1e2,samples_per_insert=0.5,error_buffer=20,max_times_sampled=3").info()
    assert limits["limits"] == {
        "min_size": 100,
        "samples_per_insert": 0.5,
        "error_buffer": 20.0,
        "max_times_sampled": 3,
    }


def test_options_agree_with_the_buffer() -> None:
    table = parse_table("r=prioritized:1e3,alpha=0.7,beta=1,stack_num=4,compress=obs+obs_next,stratified=true,seed=3")
    assert isinstance(table, ReplayTable)
    items: Any = table._items
    assert items.buffer.options == {
        "stack_num": 4,
        "ignore_obs_next": False,
        "save_only_last_obs": False,
        "sample_avail": False,
        "compress": ["obs", "obs_next"],
        "alpha": 0.7,
        "beta": 1,
        "weight_norm": True,
        "stratified": True,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replay", r"a table must have the form NAME=KIND:CAPACITY,OPTION=VALUE,..., got 'replay'"),
        ("replay=uniform", r"a table must have the form NAME=KIND:CAPACITY"),
        ("=uniform:5", r"a table must have the form NAME=KIND:CAPACITY"),
        ("r=unifrom:5", r"kind of table 'r' must be known, got 'unifrom'; did you mean 'uniform'"),
        ("r=que:5", r"did you mean 'queue'"),
        ("r=uniform:many", r"table 'r': capacity must be a whole number from 1, got 'many'"),
        ("r=uniform:2.5", r"table 'r': capacity must be a whole number from 1, got 2.5"),
        ("r=uniform:1e30", r"table 'r': size must be at most"),
        ("r=uniform:inf", r"table 'r': capacity must be a whole number from 1, got inf"),
        ("r=uniform:5,min_sise=3", r"table 'r' of kind 'uniform' has no option 'min_sise'; did you mean 'min_size'"),
        ("r=uniform:5,alpha=1", r"kind 'uniform' has no option 'alpha'"),
        ("r=fifo:5,stack_num=1", r"kind 'fifo' has no option 'stack_num'"),
        ("r=uniform:5,seed", r"options of table 'r' must have the form OPTION=VALUE, got 'seed'"),
        ("r=uniform:5,seed=", r"options of table 'r' must have the form OPTION=VALUE, got 'seed='"),
        ("r=uniform:5,remover=lifo", r"table 'r': remover must be 'fifo' for a table of steps"),
        ("r=row:5", r"did you mean 'rows'"),
        ("r=rows:5,stack_num=1", r"kind 'rows' has no option 'stack_num'"),
        ("r=rows:5,max_lag=1", r"table 'r': version must be passed with max_lag"),
        ("r=rows:0", r"table 'r': capacity must be a whole number from 1, got 0"),
        ("r=rows:5,ragged=ids:what", r"table 'r': ragged must map column names"),
        ("r=uniform:5,min_size=6", r"table 'r': min_size must be at most the capacity"),
    ],
)
def test_invalid_descriptions_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_table(text)


def test_exponents_are_rejected_as_buffers_do() -> None:
    with pytest.raises(PriorityError, match="alpha must be a number from 0, got -1"):
        parse_table("r=prioritized:5,alpha=-1")


def test_a_described_table_equals_the_table_of_its_arguments() -> None:
    described, result = parse_table("r=uniform:50,seed=3"), ReplayTable("r", capacity=50, seed=3)
    assert described.info() == result.info()


def test_a_description_declares_columns() -> None:
    table = parse_table("r=uniform:50,columns=obs:f4[84x84]+act:int64+ids:int32[?]+h:torch.bfloat16[2]+info.text:text")
    assert table.info()["columns"] == {
        "obs": "float32[84x84]",
        "actions": "int64",
        "ids": "int32[?]",
        "h": "torch.bfloat16[2]",
        "infos.text": "text",
    }
    result = {"obs": (np.float32, (84, 84)), "act": int, "ids": ("int32", [None]), "h": "torch.bfloat16[2]"}
    assert ReplayTable("r", capacity=50, columns={**result, "info.text": str}).info() == table.info()
    policies = parse_table("q=queue:4,columns=left/obs:float32[2]+right/obs:object").info()["columns"]
    assert policies == {"left": {"obs": "float32[2]"}, "right": {"obs": "object"}}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("obs", "columns must be declared as NAME:DTYPE"),
        ("obs:", "columns must be declared as NAME:DTYPE"),
        (":int64", "columns must be declared as NAME:DTYPE"),
        ("obs:int64+", "columns must be declared as NAME:DTYPE"),
        ("obs:int64+obs:float32", "column 'obs' must be declared once"),
        ("act:int64+actions:int64", "column 'actions' must be declared once, got 'actions' as well"),
        ("obs:int64+obs.camera:uint8", "column 'obs' must be declared as nested or not, got 'obs.camera' as well"),
        ("left/obs:int64+act:int64", "columns must all be of one policy, or all by policy"),
        ("left/obs:int64", "must be declared once for all policies"),
        ("obs:flot32", "column 'obs' must be declared as a dtype .* got 'flot32'; did you mean 'float32'"),
        ("obs:torch.qint8", "column 'obs' must be declared as a dtype"),
        ("obs:M8[0s]", "column 'obs' must be declared as a dtype"),
        ("obs:>f4", "column 'obs' must be declared as a dtype"),
        ("obs:S5", "column 'obs' must be declared as 'text' or 'bytes'"),
        ("obs:i4[0]", "column 'obs' must have extents of at least 1"),
        ("obs:i4[]", "column 'obs' must have extents of at least 1"),
        ("obs:i4[" + "9" * 5000 + "]", "column 'obs' must have extents of at least 1"),
        ("obs:i4[99999x99999]", "column 'obs' must have at most 2147483647 elements per row"),
        ("obs:i4[" + "x".join("1" * 33) + "]", "column 'obs' must have a row shape of at most 32 axes"),
        ("obs:i4[?x3]", "column 'obs' must have extents that all vary, or none"),
        ("obs:object[3]", "column 'obs' must have rows of one shape if it is of object"),
        ("obs:text[?]", "column 'obs' must have rows of one shape if it is of text"),
        ("a" * 300 + ":int64", "the name of a declared column must be a string of 1 to 256 bytes"),
        ({}, "columns must declare at least one column"),
        (["obs"], "columns must be a mapping"),
        ({"obs": None}, "column 'obs' must be declared as a dtype"),
        ({"obs": ("f4", 3, 4)}, "column 'obs' must be declared as a dtype"),
        ({"obs": ("f4", (-1,))}, "column 'obs' must have extents of at least 1"),
        ({"obs": ("f4", (True,))}, "column 'obs' must have extents of at least 1"),
        ({"obs": ("f4", 4)}, "column 'obs' must have a row shape"),
        ({"obs": np.dtype("i4,i4")}, "column 'obs' must be declared as a dtype"),
        ({3: "f4"}, "the name of a declared column must be a string"),
        ({(): {"obs": "f4"}}, "must be a string or an integer"),
        ({"left": {}}, "policy 'left': columns must declare at least one column"),
    ],
)
def test_declarations_that_no_column_fits_are_rejected(columns: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ReplayTable("r", capacity=50, columns=columns)
    if isinstance(columns, str):
        with pytest.raises(ArgumentError, match=message):
            parse_table(f"r=uniform:50,columns={columns}")


def test_a_table_of_rows_is_described_by_one_word() -> None:
    text = "r=rows:1e3,consumers=judge+trainer,group=uid,group_size=8,version=v,max_lag=2,length=ids,ragged=ids:int32+m"
    table = parse_table(f"{text},remover=fifo,max_nbytes=1e6,seed=3")
    info = table.info()
    assert (info["kind"], info["capacity"], info["remover"]) == ("rows", 1000, "fifo")
    assert info["consumers"] == ["judge", "trainer"]
    assert isinstance(table, RowTable)
    table.put([1], {"ids": np.ones((1, 2), np.int32), "m": [[0.5, 0.5]]})
    assert table.get([1])["m"].lengths.tolist() == [2]
    assert parse_table("r=rows:5,consumers=judge").info()["consumers"] == ["judge"]
