"""Representations of a batch (line, table, HTML table) and its size in bytes."""

from __future__ import annotations

import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.batch.summary import describe
from samplebatch.column import as_column
from tests.batch.every_kind import every_kind, in_sequences, with_every_kind
from tests.optional import torch


def table(text: str) -> dict[str, list[str]]:
    """Return the lines of a summary by column name; cells are separated by two spaces."""
    lines = [line.split() for line in text.splitlines()[1:]]
    return {line[0]: line[1:] for line in lines}


def test_the_representation_is_one_line() -> None:
    assert repr(SampleBatch(a=[1, 2], b=[3, 4])) == "SampleBatch(2 steps: ['a', 'b'])"
    assert repr(SampleBatch(obs={"x": [1]}, a=[1])) == "SampleBatch(1 steps: ['obs', 'a'])"
    assert "6 steps in 4 sequences" in repr(in_sequences(padded=True))
    assert repr(SampleBatch()) == "SampleBatch(0 steps: [])"
    assert "\n" not in repr(with_every_kind(3))


def test_the_representation_shows_no_data() -> None:
    assert "secret" not in repr(SampleBatch(a=["secret"], infos=[{"secret": 1}]))


def test_the_summary_is_a_table() -> None:
    batch = SampleBatch(
        rewards=np.array([1.0, 2.0, 6.0], np.float32),
        dones=[False, False, True],
        obs={"camera": np.zeros((3, 4, 4), np.uint8)},
        t=torch.tensor([1, 2, 3]),
        name=["a", "b", "c"],
        when=np.array([1, 2, 3], "M8[s]"),
        infos=[{}, {}, {}],
        lidar=[[1], [2, 3], []],
    )
    text = str(batch)
    assert text.splitlines()[0] == "SampleBatch(3 steps)"
    lines = table(text)
    assert lines["column"] == ["dtype", "shape", "min", "max", "mean"]
    assert lines["rewards"] == ["float32", "(3,)", "1", "6", "3"]
    assert lines["dones"] == ["bool", "(3,)", "0", "1", "0.33333"]
    assert lines["obs.camera"] == ["uint8", "(3,", "4,", "4)", "0", "0", "0"]
    assert lines["t"] == ["torch.int64", "(torch)", "(3,)", "1", "3", "2"]
    assert lines["name"] == ["text", "(3,)"]
    assert lines["when"] == ["datetime64[s]", "(3,)"]
    assert lines["infos"][0] == "object"
    assert lines["lidar"] == ["int64", "(ragged)", "(3,", "*)"]
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert len({line.index("int64") for line in text.splitlines() if " int64" in line}) <= 1


def test_the_summary_mentions_sequences() -> None:
    assert str(in_sequences(padded=False)).splitlines()[0] == "SampleBatch(6 steps in 4 sequences)"


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_kind_of_column_has_a_line(rows: int) -> None:
    batch = with_every_kind(3)[:rows]
    text = str(batch)
    assert len(text.splitlines()) == 2 + len(batch.column_names)
    assert str(SampleBatch()).splitlines()[0] == "SampleBatch(0 steps)"


def test_statistics_of_unusual_numbers() -> None:
    lines = table(
        str(
            SampleBatch(
                nan=np.array([np.nan, 1.0]),
                inf=np.array([np.inf, -np.inf]),
                half=np.array([60000, 60000], np.float16),
                big=np.array([2**63 - 1, 2**63 - 1]),
                unsigned=np.array([2**64 - 1, 0], np.uint64),
                small=np.array([1e-9, 3e-9]),
            )
        )
    )
    assert lines["nan"][2:] == ["1", "1", "1", "(1", "NaN", "from", "row", "0)"]
    assert lines["inf"][2:4] == ["-inf", "inf"]
    assert lines["half"][4] == "60000"
    assert lines["big"][4] == "9.2234e+18"
    assert lines["unsigned"][2:4] == ["0", "1.8447e+19"]
    assert lines["small"][4] == "2e-09"


def test_nan_values_are_counted_and_excluded_from_statistics() -> None:
    values = np.arange(12.0).reshape(6, 2)
    values[2, 1] = values[4] = np.nan
    lines = table(str(SampleBatch(some=values, all=np.full(6, np.nan), tensor=torch.tensor(values))))
    assert lines["some"][-8:] == ["0", "11", "4.8889", "(3", "NaN", "from", "row", "2)"]
    assert lines["tensor"][-8:] == lines["some"][-8:]
    assert lines["all"][-5:] == ["(6", "NaN", "from", "row", "0)"]
    large = np.zeros(3_000_000)
    large[::2] = np.nan
    (line,) = describe({"x": as_column(large, "x")})
    assert (line.min, line.max) == ("~0", "~0")
    assert line.mean.startswith("~0 (")
    assert line.mean.endswith("+ NaN)")


class Cells(HTMLParser):
    """Parser that collects the text of table cells and checks that tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def cells(html: str) -> list[str]:
    parser = Cells()
    parser.feed(html)
    parser.close()
    assert not parser.open
    return parser.cells


def test_the_html_summary_is_the_same_table() -> None:
    actual = cells(SampleBatch(rewards=[1.0, 2.0, 6.0], name=["a", "b", "c"])._repr_html_())
    assert actual == [
        *("SampleBatch(3 steps)", "column", "dtype", "shape", "min", "max", "mean", "over time"),
        *("rewards", "float64", "(3,)", "1", "6", "3"),
        *("name", "text", "(3,)"),
    ]


def test_names_are_escaped_in_html() -> None:
    html = SampleBatch({"<script>alert(1)</script>": [1]})._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    html = MultiAgentBatch({"<b>policy": SampleBatch(a=[1])}, 1)._repr_html_()
    assert "<b>" not in html


def test_the_summary_of_policies() -> None:
    batch = MultiAgentBatch({"p": SampleBatch(a=[1, 2]), "q": SampleBatch(b=[1.0])}, env_steps=2)
    text = str(batch)
    assert text.splitlines()[0] == "MultiAgentBatch(2 env steps, 3 agent steps)"
    assert "policy 'p', SampleBatch(2 steps)" in text
    assert "policy 'q', SampleBatch(1 steps)" in text
    assert "\n" not in repr(batch)
    assert "'p'" in repr(batch)
    actual = cells(batch._repr_html_())
    assert "MultiAgentBatch(2 env steps, 3 agent steps)" in actual
    assert "policy 'p': 2 steps" in actual
    assert "a" in actual
    assert "MultiAgentBatch(0 env steps" in str(MultiAgentBatch({}, 0))
    cells(MultiAgentBatch({}, 0)._repr_html_())


# -- size -------------------------------------------------------------------------------------------------------------


def test_size_is_the_bytes_of_the_rows_in_view() -> None:
    batch = SampleBatch(a=np.zeros((10, 3), np.float32), b=np.zeros(10), t=torch.zeros(10, dtype=torch.bfloat16))
    assert batch.size_bytes() == 10 * (12 + 8 + 2)
    assert batch[2:5].size_bytes() == 3 * (12 + 8 + 2)
    assert batch[0:0].size_bytes() == SampleBatch().size_bytes() == 0
    nested = SampleBatch(obs={"x": np.zeros((4, 2)), "y": (np.zeros(4),)})
    assert nested.size_bytes() == 4 * 16 + 4 * 8


def test_size_of_objects_is_their_shallow_size() -> None:
    infos = [{}, {"x": list(range(1000))}, None]
    size = SampleBatch(infos=infos).size_bytes()
    assert size >= sum(map(sys.getsizeof, infos))
    assert size < sys.getsizeof(infos[1]["x"])


def test_size_is_the_sum_over_all_columns_and_policies() -> None:
    batch = SampleBatch(every_kind(5))
    assert batch.size_bytes() == sum(batch.column(name).nbytes for name in batch.column_names)
    policies = MultiAgentBatch({"p": batch, "q": SampleBatch(a=[1])}, 5)
    assert policies.size_bytes() == batch.size_bytes() + 8
    padded = SampleBatch(a=np.zeros(3), seq_lens=[1, 2]).right_zero_pad(4)
    assert padded.size_bytes() == 8 * 8 + 2 * 4
