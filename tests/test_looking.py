"""Representations of batches, buffers and reports: text, notebooks, figures and tables of other tools."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from samplebatch import (
    Batch,
    CollectStats,
    Dataset,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.batch.summary import sparkline
from samplebatch.errors import ColumnNotFoundError, ColumnTypeError
from tests.optional import torch


def fill(buffer: Any, steps: int = 6) -> Any:
    for i in range(steps):
        step = Batch(obs={"x": np.full(2, float(i))}, act=i, rew=i / 2, terminated=i == 3, truncated=False, info={})
        buffer.add(step)
    return buffer


def vector(size: int = 8) -> VectorReplayBuffer:
    buffer = VectorReplayBuffer(size, 2)
    for i in range(6):
        rows = Batch(obs=[i, 10 + i], act=[0, 0], rew=[0.5, 1.5], terminated=[False, True], truncated=[False, False])
        buffer.add(rows)
    return buffer


def agents() -> MultiAgentReplayBuffer:
    rows = {"obs": np.zeros((4, 2)), "actions": [0] * 4, "rewards": [0.5] * 4, "dones": [False] * 4}
    buffer = MultiAgentReplayBuffer(8)
    buffer.add(MultiAgentBatch({"<b>": SampleBatch(rows)}, 4))
    return buffer


def report() -> CollectStats[Any]:
    rows = CollectStats[SampleBatch].from_counts(steps=3, time_s=2.0, returns=np.array([1.0]), lens=np.array([3]))
    return CollectStats.from_counts(
        steps=6,
        time_s=2.0,
        returns=np.array([1.0, 3.0]),
        lens=np.array([2, 4]),
        batch=SampleBatch({"<i>": [1.0, 2.0]}),
        policies={"<u>": rows},
    )


def cells(line: str) -> list[str]:
    return line.split()


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_small_buffer_prints_its_values_slot_by_slot() -> None:
    """The output agrees with the tutorial of Tianshou's buffers."""
    buffer = ReplayBuffer(10)
    for i in range(3):
        buffer.add(Batch(obs=i, act=i, rew=i, terminated=0, truncated=0, done=0, obs_next=i + 1, info={}))
    flags = """array([False, False, False, False, False, False, False, False, False,
                       False])"""
    assert (
        repr(buffer)
        == str(buffer)
        == (
            "ReplayBuffer(\n"
            "    obs: array([0, 1, 2, 0, 0, 0, 0, 0, 0, 0]),\n"
            "    act: array([0, 1, 2, 0, 0, 0, 0, 0, 0, 0]),\n"
            "    rew: array([0., 1., 2., 0., 0., 0., 0., 0., 0., 0.]),\n"
            f"    terminated: {flags},\n"
            f"    truncated: {flags.replace(' ' * 23, ' ' * 22)},\n"
            f"    done: {flags.replace(' ' * 23, ' ' * 17)},\n"
            "    obs_next: array([1, 2, 3, 0, 0, 0, 0, 0, 0, 0]),\n"
            "    info: Batch(),\n"
            ")"
        )
    )


def test_a_large_buffer_prints_a_summary() -> None:
    assert repr(fill(ReplayBuffer(20))).startswith("ReplayBuffer(\n    obs: Batch(\n             x: array([[0., 0.],")
    lines = repr(fill(ReplayBuffer(21))).splitlines()
    assert lines[0].startswith("ReplayBuffer(6 of 21 steps, ")
    assert cells(lines[1]) == ["column", "dtype", "shape", "min", "max", "mean", "memory"]
    actual = {cells(line)[0]: line for line in lines[2:]}
    assert cells(actual["obs.x"]) == ["obs.x", "float64", "(6,", "2)", "0", "5", "2.5", "336", "B"]
    assert cells(actual["done"])[1:6] == ["bool", "(6,)", "0", "1", "0.16667"]
    assert str(fill(ReplayBuffer(21))) == "\n".join(lines)


@pytest.mark.parametrize("size", [0, 7, 10**6])
def test_an_empty_buffer_prints_its_class(size: int) -> None:
    assert repr(ReplayBuffer(size)) == "ReplayBuffer()"
    assert repr(PrioritizedReplayBuffer(size, alpha=0.5, beta=0.5)) == "PrioritizedReplayBuffer()"
    assert repr(VectorReplayBuffer(2 * size, 2)) == "VectorReplayBuffer()" == repr(VectorReplayBuffer(40, 2))
    full = fill(ReplayBuffer(21))
    full.reset()
    assert repr(full) == "ReplayBuffer()"


def test_slots_without_rows_are_excluded_from_ranges() -> None:
    line = next(line for line in repr(fill(ReplayBuffer(1000), 3)).splitlines() if "act" in line)
    assert cells(line)[:6] == ["act", "int64", "(3,)", "0", "2", "1"]


def test_rings_and_their_parts() -> None:
    small = vector()
    assert "obs: array([ 4,  5,  2,  3, 14, 15, 12, 13])" in repr(small)
    assert repr(small.buffers[1]).startswith("ReplayBuffer(\n    obs: array([14, 15, 12, 13]),\n")
    buffer = vector(60)
    assert repr(buffer).startswith("VectorReplayBuffer(12 of 60 steps in 2 rings, ")
    line = next(line for line in repr(buffer.buffers[1]).splitlines() if "obs" in line)
    assert cells(line)[:6] == ["obs", "int64", "(6,)", "10", "15", "12.5"]
    assert cells(line)[6:] == ["240", "B"]


@pytest.mark.parametrize(
    "make",
    [
        lambda size: ReplayBuffer(size, compress="obs"),
        lambda size: PrioritizedReplayBuffer(size, alpha=0.5, beta=0.5),
        lambda size: ReplayBuffer(size, stack_num=3),
        lambda size: ReplayBuffer(size, ragged="act"),
    ],
    ids=["compressed", "prioritized", "stacked", "ragged"],
)
@pytest.mark.parametrize("size", [8, 30])
def test_every_kind_of_buffer_prints(make: Callable[[int], Any], size: int) -> None:
    buffer = make(size)
    for i in range(12):
        act = np.arange(i % 3) if buffer.options.get("ragged") else i
        buffer.add(Batch(obs=np.full(3, i), act=act, rew=0.0, terminated=False, truncated=False, info={"x": i}))
    before = buffer.sample_indices(0).tolist()
    assert "obs" in repr(buffer)
    assert ("\n    act: " in repr(buffer)) == (size == 8)
    assert "<table>" in buffer._repr_html_()
    assert buffer.sample_indices(0).tolist() == before


def test_a_large_buffer_prints_quickly_with_a_note() -> None:
    rows, flags = 3_000_000, np.zeros(3_000_000, bool)
    obs = np.arange(rows, dtype=np.float64)
    buffer = ReplayBuffer.from_data(obs, flags, obs, flags, flags, flags, obs)
    start = time.perf_counter()
    text = repr(buffer)
    assert time.perf_counter() - start < 2
    line = next(line for line in text.splitlines() if "obs " in line)
    assert cells(line)[3:5] == ["~0", "~3e+06"]
    assert text.splitlines()[-1] == "  ~ of evenly spaced rows"
    assert "~" not in repr(fill(ReplayBuffer(8)))


def test_ids_have_a_number_and_no_mean() -> None:
    text = str(SampleBatch(eps_id=[2**62, 2**62, 2**62 + 1], agent_index=[0, 1, 1], t=[0, 1, 0]))
    lines = {cells(line)[0]: cells(line)[3:] for line in text.splitlines()[2:]}
    assert lines["eps_id"] == [str(2**62), str(2**62 + 1), "2", "ids"]
    assert lines["agent_index"] == ["0", "1", "2", "ids"]
    assert lines["t"] == ["0", "1", "0.33333"]


def test_a_report_prints_a_summary() -> None:
    lines = repr(report()).splitlines()
    assert lines[0] == "CollectStats(6 steps, 2 episodes in 2 s, 3 steps/s)"
    assert [cells(line) for line in lines[2:5]] == [
        ["returns", "2", "1", "1", "3"],
        ["lens", "3", "1", "2", "4"],
        ["<u>", "returns", "1", "0", "1", "1"],
    ]
    assert lines[-1] == "  batch: SampleBatch(2 steps: ['<i>'])"
    assert "returns" in repr(CollectStats())


# -- notebooks ---------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects the tags of a page and checks that all tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


SHOWN: dict[str, Callable[[], Any]] = {
    "flat": lambda: SampleBatch({"<i>": [1.0, 2.0]}),
    "nested": lambda: Batch({"<i>": [1.0, 2.0], "none": None, "n": 3, "deep": {"<u>": torch.zeros(2)}, "r": Batch()}),
    "policies": lambda: MultiAgentBatch({"<b>": SampleBatch({"<i>": [1.0, 2.0]})}, 2),
    "buffer": lambda: fill(ReplayBuffer(4)),
    "vector": lambda: vector(),
    "agents": agents,
    "report": report,
}


@pytest.mark.parametrize("name", SHOWN)
def test_notebooks_show_a_table_with_sparklines_and_nothing_unescaped(name: str) -> None:
    page = Tags()
    html = SHOWN[name]()._repr_html_()
    page.feed(html)
    assert not page.open
    assert {"table", "svg", "polyline"} <= page.seen
    assert not {"i", "b", "u"} & page.seen
    assert len(html) < 20_000


def test_notebooks_show_the_columns_that_a_dataset_reads(tmp_path: Path) -> None:
    empty, path = Dataset(tmp_path / "empty"), tmp_path / "<u>"
    rows = {
        "<i>": [1.0, 2.0],
        "obs": {"x": np.zeros((2, 3, 4), np.float32)},
        "lidar": [[1], [2, 3]],
        "infos": [{}, {"a": {1}}],
    }
    Dataset(path).extend(SampleBatch(rows))
    for text, reported in (
        (Dataset(path), ["<td>&lt;i&gt;</td><td>float64</td><td>(2,)</td>", "<td>infos</td>", "(2, *)"]),
        (
            Dataset(path, columns=["obs"], filters=[("<i>", ">", 1)]),
            ["<td>obs.x</td><td>float32</td><td>(1, 3, 4)</td>"],
        ),
        (empty, ["0 rows in 0 parts"]),
    ):
        page, html = Tags(), text._repr_html_()
        page.feed(html)
        assert not page.open
        assert not {"i", "u"} & page.seen
        assert all(item in html for item in reported), html
    assert "lidar" not in Dataset(path, columns=["obs"])._repr_html_()


def test_sparklines_accept_any_numbers() -> None:
    assert sparkline([1.0]) == sparkline([float("nan")] * 3) == ""
    assert "nan" not in sparkline([1.0, float("nan"), float("inf"), 2.0])
    assert sparkline([5.0, 5.0]).count(",") == 2
    assert 'points="0.0,18.0 50.0,2.0 100.0,10.0"' in sparkline([-1.7e308, 1.7e308, 0.0])


# -- tables of other tools ---------------------------------------------------------------------------------------------


def test_pandas_reads_a_batch() -> None:
    batch = SampleBatch(obs=np.arange(6.0).reshape(3, 2), rewards=np.array([0.5, 1, 2], np.float32), infos=[{}] * 3)
    for frame in (batch.to_pandas(), pd.DataFrame(batch)):
        assert list(frame.columns) == ["obs", "rewards", "infos"]
        assert frame["rewards"].tolist() == [0.5, 1, 2]
        assert frame["obs"][1].tolist() == [2, 3]
        assert frame["infos"].tolist() == [{}] * 3
    assert batch.to_pandas()["rewards"].dtype == np.float32


def frame_columns() -> SampleBatch:
    return SampleBatch(
        t=[0, 1, 2],
        path=[[1, 2], [3], []],
        grid=[np.array([[1, 2], [3, 4]]), np.zeros((0, 2), int), np.array([[5, 6]])],
        hits=[np.array([True]), np.array([], bool), np.array([False, True])],
        soft=[torch.ones(1), torch.zeros(2), torch.ones(3)],
        obs={"lidar": [[0.5], [], [1.5, 2.5]], "x": [1.0, 2.0, 3.0]},
        task=["push", None, "reach"],
        loss=torch.tensor([0.5, 1.5, 2.5]),
    )


LISTS = {
    "path": [[1, 2], [3], []],
    "grid": [[[1, 2], [3, 4]], [], [[5, 6]]],
    "hits": [[True], [], [False, True]],
    "soft": [[1.0], [0.0, 0.0], [1.0, 1.0, 1.0]],
    "task": ["push", None, "reach"],
    "loss": [0.5, 1.5, 2.5],
    "t": [0, 1, 2],
}


@pytest.mark.parametrize("rows", [slice(None), slice(1, None), slice(1, 2)], ids=str)
def test_polars_reads_ragged_columns_as_lists(rows: slice) -> None:
    frame = pl.DataFrame(frame_columns()[rows])
    assert {name: frame[name].to_list() for name in LISTS} == {name: values[rows] for name, values in LISTS.items()}
    assert frame.schema["path"] == pl.List(pl.Int64)
    assert frame.schema["grid"] == pl.List(pl.List(pl.Int64))
    assert frame.schema["hits"] == pl.List(pl.Boolean)
    assert frame.schema["soft"] == pl.List(pl.Float32)
    halves = pl.DataFrame(frame_columns().select("soft").to_torch(floats="bfloat16"))
    assert halves["soft"].to_list() == LISTS["soft"]


def test_pandas_reads_ragged_columns_as_lists() -> None:
    batch = frame_columns()
    for frame in (pd.DataFrame(batch), batch.to_pandas()):
        actual = {name: [cell.tolist() if hasattr(cell, "tolist") else cell for cell in frame[name]] for name in LISTS}
        assert actual == LISTS
        assert not any(isinstance(cell, torch.Tensor) for name in LISTS for cell in frame[name])


def test_polars_reads_the_stream_of_a_batch_as_a_series_of_structs() -> None:
    # Polars decides so for every object with Arrow's stream but pyarrow's own: DataFrame is what makes a frame.
    batch = frame_columns().select("t", "path", "task")
    series = pl.from_arrow(batch)
    assert isinstance(series, pl.Series)
    for frame in (series.struct.unnest(), pl.DataFrame(batch), pl.from_arrow(batch.to_arrow())):
        assert isinstance(frame, pl.DataFrame)
        assert {name: frame[name].to_list() for name in batch} == {name: LISTS[name] for name in batch}


@pytest.mark.parametrize("name", ["class", "two words"])
def test_columns_with_invalid_record_names_require_data_frames(name: str) -> None:
    batch = SampleBatch({"a": [1], name: [2]})
    with pytest.raises(ColumnTypeError, match=f"column '{name}' must .*call to_pandas"):
        np.asarray(batch)
    assert list(batch.to_pandas().columns) == ["a", name]


def test_a_data_frame_has_every_kind_of_column() -> None:
    batch = SampleBatch(
        obs={"x": [1, 2]}, t=torch.tensor([0.5, 1.5]), lidar=[[1], [2, 3]], image=np.zeros((2, 3)), eps_id=[0, 0]
    ).compress(columns={"image"})
    frame = batch.to_pandas()
    assert list(frame.columns) == ["obs.x", "t", "lidar", "image", "eps_id"]
    assert [row.tolist() for row in frame["lidar"]] == [[1], [2, 3]]
    assert frame["image"][0].tolist() == [0, 0, 0]
    assert frame["t"].tolist() == [0.5, 1.5]
    assert len(pd.DataFrame(SampleBatch())) == 0
    nested = Batch(obs={"x": [1, 2]}, rew=[0.5, 1.0])
    with pytest.raises(ColumnTypeError, match="has no len"):
        pd.DataFrame(nested)
    assert nested.to_pandas().columns.tolist() == ["obs.x", "rew"]
    recurrent = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 3.0], seq_lens=[1, 2]).to_pandas()
    assert recurrent["state_in_0"].tolist() == [1, 3, 3]


def test_other_batches_and_buffers_are_data_frames_too() -> None:
    assert Batch(a=[1, 2], b={"c": [0.5, 1.5]}).to_pandas()["b.c"].tolist() == [0.5, 1.5]
    policies = MultiAgentBatch({"p": SampleBatch(a=[1, 2]), "q": SampleBatch(a=[3])}, 2).to_pandas()
    assert policies["policy_id"].tolist() == ["p", "p", "q"]
    assert policies["a"].tolist() == [1, 2, 3]
    assert fill(ReplayBuffer(4)).to_pandas()["act"].tolist() == [2, 3, 4, 5]
    assert ReplayBuffer(4).to_pandas().empty


def test_polars_reads_a_buffer() -> None:
    frame: Any = pl.DataFrame(fill(ReplayBuffer(4)))
    assert frame["act"].to_list() == [2, 3, 4, 5]
    assert frame["rew"].to_list() == [1.0, 1.5, 2.0, 2.5]
    assert pl.DataFrame(vector())["obs"].to_list() == [2, 3, 4, 5, 12, 13, 14, 15]
    assert fill(ReplayBuffer(4)).to_arrow().num_rows == 4
    assert pl.DataFrame(ReplayBuffer(4)).is_empty()


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_a_plot_has_an_axis_for_each_column_and_the_ends_of_episodes() -> None:
    batch = SampleBatch(
        rewards=[0.0, 1.0, 2.0], obs=np.zeros((3, 2)), image=np.zeros((3, 9, 9)), eps_id=[0, 0, 1], infos=[{}] * 3
    )
    figure = batch.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["rewards", "obs", "image\n(mean)"]
    assert [len(axes.lines) for axes in figure.axes] == [1, 2, 1]
    (ends,) = figure.axes[0].collections
    assert [float(path.vertices[0][0]) for path in ends.get_paths()] == [1.5]  # type: ignore[attr-defined]
    assert [axes.get_ylabel() for axes in batch.plot("eps_id").axes] == ["eps_id"]
    assert [axes.get_ylabel() for axes in Batch(a={"b": [1, 2]}).plot().axes] == ["a.b"]
    figure.canvas.draw()


def test_a_plot_of_several_policies_has_an_axis_for_each_of_their_columns() -> None:
    walker = SampleBatch(rewards=[0.0, 1.0, 2.0], obs=np.zeros((3, 2)), eps_id=[0, 0, 1])
    batch = MultiAgentBatch({"walker": walker, 0: SampleBatch(rewards=[0.5])}, 3)
    figure = batch.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["walker/rewards", "walker/obs", "0/rewards"]
    ends = [axes.collections[0].get_paths() for axes in figure.axes]
    assert [[float(path.vertices[0][0]) for path in paths] for paths in ends] == [[1.5], [1.5], []]  # type: ignore[attr-defined]
    assert [axes.get_ylabel() for axes in batch.plot("obs").axes] == ["walker/obs"]
    with pytest.raises(ColumnNotFoundError, match="rewards"):
        batch.plot("reward")
    figure.canvas.draw()
    MultiAgentBatch({}, 0).plot().canvas.draw()


def test_a_plot_of_a_column_that_cannot_be_drawn_is_rejected() -> None:
    batch = SampleBatch(rewards=[0.0], infos=[{}])
    with pytest.raises(ColumnTypeError, match="column 'infos' must contain numbers to be plotted"):
        batch.plot("infos")
    with pytest.raises(ColumnNotFoundError, match="rewards"):
        batch.plot("reward")
    SampleBatch().plot().canvas.draw()


def test_long_batches_are_drawn_by_some_steps() -> None:
    figure = SampleBatch(a=np.arange(100_000.0), dones=np.arange(100_000) % 2 == 1).plot("a")
    (line,) = figure.axes[0].lines
    assert len(line.get_xydata()) == 2000
    assert not figure.axes[0].collections


# -- misspelt names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wrong", "right"),
    [
        (SampleBatch(a=[1]), "shufle", "shuffle"),
        (MultiAgentBatch({}, 0), "minibatchs", "minibatches"),
        (Batch(a=[1]), "to_trch", "to_torch"),
        (ReplayBuffer(2), "smaple", "sample"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_tracebacks_suggest_a_similar_method(
    value: Any, wrong: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(value, wrong)
    sys.__excepthook__(caught.type, caught.value, caught.tb)
    assert f"Did you mean: '{right}'?" in capsys.readouterr().err
