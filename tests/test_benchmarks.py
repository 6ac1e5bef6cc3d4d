"""Every row of the benchmarks runs, its contestants agree, and results are compared with the correct threshold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import report
from benchmarks.__main__ import LAYERS, main, rows_of
from benchmarks.compare import differs
from benchmarks.harness import QUICK, DisagreementError, Outcome, Row, Way, measure, row
from benchmarks.peers import _MAKERS, library

ROWS = [r for r in rows_of(LAYERS) if not (r.name.startswith("transport.") and r.name.endswith("256MB"))]
"""Moving the largest batches takes the slower contestants too long for a test."""

FIRST = {rows_of([layer])[0].name for layer in LAYERS} - {"cluster.small.1", "transport.send.1KB"}
"""One row of each layer; the others are for long runs, as are those of two layers, for which Ray must start."""


@pytest.fixture(scope="module", autouse=True)
def _no_library_left() -> Iterator[None]:
    """Unload the peers, because one peer has actors on the Ray cluster that `conftest.py` disconnects."""
    yield
    library.cache_clear()


@pytest.mark.parametrize(
    "declared", [pytest.param(r, id=r.name, marks=() if r.name in FIRST else pytest.mark.long) for r in ROWS]
)
def test_row_runs_and_its_contestants_agree(declared: Row) -> None:
    outcome = measure(declared, QUICK)
    assert outcome.us["ours"] > 0
    assert outcome.us.keys() == {
        contestant for contestant in declared.ways_of(QUICK) if library(contestant) is not None
    }


def test_every_row_has_its_own_name() -> None:
    names = [r.name for r in ROWS]
    assert len(set(names)) == len(names)


def test_every_contestant_can_be_imported_or_is_reported_as_missing() -> None:
    assert {
        contestant for row in rows_of(LAYERS, "*") for contestant in row.ways if contestant not in ("bare", "numpy")
    } <= set(_MAKERS)


def test_contestants_that_disagree_are_detected() -> None:
    wrong = row("wrong", lambda: {"a": np.arange(3)}, bare=lambda d: d["a"], numpy=lambda d: d["a"] + 1)
    with pytest.raises(DisagreementError, match="wrong: numpy and bare disagree at result"):
        measure(wrong, QUICK)


def test_in_place_benchmarks_receive_a_new_argument_each_call() -> None:
    recorded: list[list[int]] = []
    way = Way(lambda *_: [1, 2], lambda items: recorded.append(list(items)) or items.clear(), fresh=list)
    measure(Row("clear", lambda: None, {"numpy": way}, view=None), replace(QUICK, rounds=3))
    assert recorded == [[1, 2]] * 3


def test_a_quick_run_calls_each_contestant_to_check_it_and_to_time_it() -> None:
    calls: list[str] = []
    ways = {
        contestant: Way(lambda *_, label=contestant: label, lambda label: calls.append(label))
        for contestant in ("bare", "numpy")
    }
    measure(Row("call", lambda: None, ways), QUICK)
    assert calls == ["bare", "numpy"] * 2


def test_quick_runs_omit_contestants_that_start_slowly() -> None:
    ways = {"bare": Way(lambda *_: 1, lambda n: n), "numpy": Way(lambda *_: 1, lambda n: n, quick=False)}
    declared = Row("slow", lambda: None, ways)
    assert measure(declared, QUICK).us.keys() == {"bare"}
    assert measure(declared, replace(QUICK, rounds=2)).us.keys() == {"bare", "numpy"}


@pytest.mark.parametrize(
    ("a", "b", "where"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, None),
        ({"a": [1, 2]}, {"a": [1, 3]}, "result['a'][1]"),
        ({"a": 1}, {"b": 1}, "result"),
        (np.zeros((1, 2)), np.zeros(2), "result"),
    ],
)
def test_differs_reports_the_position(a: object, b: object, where: str | None) -> None:
    assert differs(a, b) == where


def _outcome(*, traffic: bool = False, bar: float | None = None, level: float = 1.0, **us: float) -> Outcome:
    return Outcome(Row("work", lambda: None, {}, traffic=traffic, bar=bar, level=level), us)


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (_outcome(ours=2.0, bare=1.0, rllib=3.0), "met"),
        (_outcome(ours=2.0, bare=0.5, rllib=3.0), "over 2.5x bare"),
        (_outcome(ours=2.0, bare=1.0, rllib=3.0, pyarrow=1.5), "behind pyarrow"),
        (_outcome(traffic=True, ours=200.0, bare=100.0), "met"),
        (_outcome(traffic=True, ours=800.0, bare=400.0, rllib=700.0), "behind rllib; over 1.15x bare"),
        (_outcome(ours=2.0, bare=1.0, numpy=2.0), "behind numpy"),
        (_outcome(level=1.1, ours=2.1, bare=1.0, numpy=2.0), "met"),
        (_outcome(bar=1.5, ours=1.6, bare=1.0), "over 1.5x bare"),
        (_outcome(bare=1.0, rllib=3.0), "not measured"),
    ],
)
def test_verdict(outcome: Outcome, verdict: str) -> None:
    assert outcome.verdict == verdict


def test_markdown_has_a_line_for_each_row() -> None:
    lines = report.markdown([_outcome(ours=2.0, bare=1.0, rllib=3.0)]).splitlines()
    assert lines[2] == "| `work` | 2.00 | 3.00 | rllib 3.00 | 1.00 | 0.67 | 2.00 | met |"


def test_command_line_filters_and_writes_json(tmp_path, capsys) -> None:
    path = tmp_path / "outcomes.json"
    assert main(["batch", "--quick", "--markdown", "--filter", "sb.slice", "--json", str(path)]) == 0
    assert "| `sb.slice` |" in capsys.readouterr().out
    assert [r["work"] for r in json.loads(path.read_text())["rows"]] == ["sb.slice"]


def test_command_line_rejects_unknown_names(capsys) -> None:
    for arguments in (["nothing"], ["batch", "--filter", "nothing"]):
        with pytest.raises(SystemExit):
            main(arguments)
    errors = capsys.readouterr().err
    assert "layers must be among batch, " in errors
    assert "no row matches 'nothing'" in errors


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are pinned to cores on Linux")
def test_everything_can_be_pinned_to_one_core() -> None:
    command = [sys.executable, "-m", "benchmarks", "batch", "--quick", "--one-core", "--filter", "sb.slice"]
    done = subprocess.run([*command, "--only", "ours,bare", "--markdown"], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("; 1 core.")


def test_missing_peer_is_omitted_and_reported() -> None:
    program = (
        "import sys; sys.modules['tensordict'] = None\n"
        "from benchmarks.peers import _MAKERS, library\n"
        "print(library('tensordict'), library('tensordict'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "None"]
    assert done.stderr.count("pip install 'samplebatch[bench]'") == 1


@pytest.mark.parametrize("rich", [True, False])
def test_table_is_printed_with_and_without_rich(rich: bool, monkeypatch, capsys) -> None:
    if not rich:
        for module in ("rich", "rich.console", "rich.table"):
            monkeypatch.setitem(sys.modules, module, None)
    report.show([_outcome(ours=2.0, bare=1.0, rllib=3.0), _outcome(ours=2.0, bare=1.0, rllib=1.0)])
    text = capsys.readouterr().out
    assert "0.67" in text
    assert "behind rllib" in text
    assert "1 of 2 rows meet their target" in text
