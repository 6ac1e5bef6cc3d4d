"""The mutation run records which tests call a function, which code is executed, and which mutants survive."""

from __future__ import annotations

from pathlib import Path

from tests import mutants
from tests.mutants import ROOT, Case, Mutant, choose_tests, function_at, report, unexecuted_spans

PATH = "samplebatch/returns/arrays.py"


def line_of(text: str, path: str = PATH) -> int:
    return next(i for i, line in enumerate((ROOT / path).read_text().splitlines(), 1) if text in line)


def mutant(line: int, outcome: str = "") -> Mutant:
    return Mutant(PATH, line, "gae", "core/AddNot", "", ("    if a:", "    if not a:"), outcome=outcome)


def test_tests_that_call_the_mutated_function_run_fastest_first() -> None:
    line = line_of("edges, slots")
    actual = function_at(PATH, line)
    assert actual == ((PATH, line_of("def _sum_windows")), "_sum_windows")
    slow, quick, other = (
        Case("slow", 2.0, {actual[0]}),
        Case("quick", 1.0, {actual[0]}),
        Case("other", 0.1, {(PATH, 1)}),
    )
    assert choose_tests(mutant(line), [slow, quick, other]) == [quick, slow]
    assert choose_tests(mutant(1), [slow, quick, other]) == [other, quick, slow]


def test_annotations_are_not_executed() -> None:
    line = line_of("def gae(")
    assert any(begin[0] >= line for begin, _ in unexecuted_spans(PATH))
    assert not any(begin <= (1, 0) < end for begin, end in unexecuted_spans(PATH))


def test_a_report_lists_undetected_mutants_and_counts_the_others() -> None:
    lines = report([mutant(1, "killed"), mutant(2, "survived"), mutant(3, "no test")]).splitlines()
    assert [line.partition(" ")[0] for line in lines if line.startswith(f"{PATH}:")] == [f"{PATH}:2", f"{PATH}:3"]
    assert lines[-1].split() == ["all", "1", "0", "1", "1"]


def test_targets_and_their_tests_exist() -> None:
    for target, tests in mutants.TARGETS.items():
        assert all(Path(ROOT, path).exists() for path in (target, *tests)), target
