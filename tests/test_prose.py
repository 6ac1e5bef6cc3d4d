"""Docstrings, errors and pages use the verbs and nouns of the field, and local names say what they contain.

The patterns count words that usually replace a technical term ("take" for accept, require or receive; "that of" for the
noun; "stands" for is stored). A rate is a detector, not a measure: rewrite the sentence, do not swap the word. Lower
the limits of a folder when its rates fall.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "samplebatch"

PATTERNS = (
    r"(go|goes|going|went) on",
    r"under way",
    r"(that|those) of",
    r"of (it|them|these|those|which|whom)",
    r"(tell|tells|told|telling|say|says|said)",
    r"(stand|stands|stood|lie|lies|lay|lain)",
    r"(take|takes|took|taken|come|comes|came)",
    r"(made|whole)(?! number)",
    r"(begin|begins|began|begun|refuse|refuses|refused)",
    r"of (its|their|his|one's) own",
    r"one after (the other|another)",
    r"hand(s|ed|ing)? (out|over|on|down)",
    r"(likewise|nevertheless|anew|whatever|whoever|for ever|without a word)",
)
PATTERN = re.compile(rf"\b({'|'.join(PATTERNS)})\b", re.IGNORECASE)
CODE = re.compile(r"(?m)^\s*(>>>|\.\.\. ).*$|`[^`]*`")
EMPTY_NAMES = frozenset(
    {
        *("found", "own", "held", "kept", "told", "said", "wanted", "place", "places", "one", "known", "given"),
        *("made", "taken", "rest", "whole", "most", "there"),
    }
)


class Limits(NamedTuple):
    """Maximum rates of a folder: hits per 1,000 words of docstrings and of errors, and empty names in percent."""

    docstrings: float
    errors: float
    names: float


LIMITS = {
    "": Limits(1.0, 1.0, 0.3),
    "batch": Limits(2.0, 2.0, 0.3),
    "buffer": Limits(1.5, 1.5, 0.3),
    "cli": Limits(1.5, 2.0, 0.6),
    "column": Limits(1.5, 1.5, 0.3),
    "convert": Limits(1.5, 2.0, 0.3),
    "env": Limits(1.5, 2.0, 0.3),
    "learn": Limits(1.5, 1.5, 0.3),
    "loggers": Limits(1.5, 2.0, 0.3),
    "policy": Limits(1.0, 1.0, 0.3),
    "returns": Limits(1.0, 1.0, 0.3),
    "rollout": Limits(1.5, 2.0, 0.3),
    "service": Limits(2.5, 2.0, 0.7),
    "storage": Limits(1.5, 1.5, 0.3),
    "testing": Limits(1.5, 2.0, 0.6),
    "tokens": Limits(1.5, 1.5, 0.5),
    "transport": Limits(1.5, 1.0, 0.3),
    "workers": Limits(1.5, 2.0, 0.3),
}


@pytest.mark.parametrize("folder", LIMITS, ids=lambda folder: folder or "samplebatch")
def test_prose_stays_within_the_limits_of_its_folder(folder: str) -> None:
    files = (PACKAGE / folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(files)]
    assert trees, f"no modules in {folder!r}"
    rates = Limits(
        rate([text for tree in trees for text in docstrings(tree)]),
        rate([text for tree in trees for text in messages(tree)]),
        empty_names([name for tree in trees for name in assigned_names(tree)]),
    )
    above = {field: (value, limit) for field, value, limit in zip(rates._fields, rates, LIMITS[folder], strict=True)
             if value > limit}  # fmt: skip
    assert not above, f"{folder or 'samplebatch'}: rates above their limits (rate, limit): {above}"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_plain_words(page: Path) -> None:
    """A page has at most two phrases per 1,000 words; a short page may have one."""
    prose = CODE.sub("", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    phrases = [match[0] for match in PATTERN.finditer(prose)]
    assert len(phrases) <= max(1, 2 * len(prose.split()) / 1000), phrases


def test_every_folder_has_limits() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= LIMITS.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Return the rows that a policy takes, and those of others.", 2),
        ("Return the rows of a policy.", 0),
        ("Call `take` and `told`; pass a whole number.", 0),
        (">>> told = take(1)\nWhole files.", 1),
    ],
)
def test_phrases_are_counted_outside_of_code(text: str, count: int) -> None:
    assert count_phrases(text) == count


def count_phrases(text: str) -> int:
    return len(PATTERN.findall(CODE.sub("", text)))


def rate(texts: list[str]) -> float:
    """Return phrases per 1,000 words."""
    return 1000 * sum(map(count_phrases, texts)) / max(sum(len(text.split()) for text in texts), 1)


def empty_names(assigned: list[str]) -> float:
    """Return the percentage of assignments to names without a meaning."""
    return 100 * sum(name in EMPTY_NAMES for name in assigned) / max(len(assigned), 1)


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def messages(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for leaf in ast.walk(node.exc):
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str) and " " in leaf.value:
                    yield leaf.value


def assigned_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for leaf in ast.walk(target):
                    if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store):
                        yield leaf.id
