"""The site's build: reference pages of classes, and examples without prompts."""

from __future__ import annotations

import ast
import doctest
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("torch")

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if ">>> " in page.read_text())
GROUPS = sorted(DOCS.glob("api/*/index.md"))


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"site_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[f"site_{name}"] = module
    spec.loader.exec_module(module)
    return module


hooks, pictures = load("hooks"), load("pictures")


def test_examples_of_the_hooks() -> None:
    failed, attempted = doctest.testmod(hooks)
    assert not failed
    assert attempted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_of_pages_can_be_copied_and_run(page: Path) -> None:
    text = hooks._FENCE.sub(lambda match: hooks.without_prompts(match[1]), page.read_text())
    code = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert code
    for block in code:
        assert not block.startswith(">>>")
        ast.parse(block)
    # Nothing but prompts is lost.
    blocks = hooks._FENCE.findall(page.read_text())
    examples = [example for block in blocks for example in doctest.DocTestParser().get_examples(block)]
    outputs = re.findall(r"^```\{ \.text \.output \}\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert [example.want.rstrip() for example in examples if example.want] == outputs


def test_listings_are_split_into_code_and_output() -> None:
    listing = (
        '<span class="gp">&gt;&gt;&gt; </span><span class="n">a</span>\n<span class="gp">... </span><span>b</span>\n'
        '<span class="go">1</span>\n<span class="gp">&gt;&gt;&gt; </span><span>c</span>\n'
    )
    html = hooks.on_page_content(f'<div class="highlight"><pre><span></span><code>{listing}</code></pre></div>')
    assert "&gt;&gt;&gt;" not in html
    assert re.findall(r'<div class="([a-z ]+)">', html) == ["highlight", "output highlight", "highlight"]
    assert '<span class="n">a</span>\n<span>b</span>' in html


@pytest.mark.parametrize("group", GROUPS, ids=lambda page: page.parent.name)
def test_each_class_has_a_page_and_a_link(group: Path) -> None:
    names = hooks.classes_of(group)
    listed = {path for other in GROUPS for path in hooks.classes_of(other).values()}
    for name, path in names.items():
        assert f"::: {path}\n" in hooks.class_page(name, path, listed)
        link = hooks.link(name, path)
        assert link.startswith(f"- [`{name}`]({name}.md): ")
        assert len(link.partition(": ")[2]) > 10, f"{path} must have a first sentence"


def test_members_stand_on_the_page_of_the_class_that_has_them() -> None:
    listed = {path for group in GROUPS for path in hooks.classes_of(group).values()}
    assert "inherited_members: true" in hooks.class_page("ReplayBuffer", "samplebatch.ReplayBuffer", listed)
    vector = hooks.class_page("VectorReplayBuffer", "samplebatch.VectorReplayBuffer", listed)
    assert "inherited_members: false" in vector


def test_pictures_are_those_that_the_script_draws() -> None:
    drawn = pictures.draw_all()
    assert len(drawn) >= 22
    for name, text in drawn.items():
        assert (DOCS / "images" / name).read_text() == text, f"{name}: run make pictures"


def test_each_picture_is_on_a_page_for_both_themes() -> None:
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    for name in pictures.PICTURES:
        for theme in pictures.THEMES:
            assert f"images/{name}-{theme}.svg#only-{theme})" in text
