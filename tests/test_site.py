"""The site's build: reference pages of classes, and examples without prompts."""

from __future__ import annotations

import ast
import doctest
import re
import struct
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import samplebatch

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


hooks, links, pictures, versions = load("hooks"), load("links"), load("pictures"), load("versions")


@pytest.mark.parametrize("module", [hooks, versions], ids=["hooks", "versions"])
def test_examples_of_the_scripts(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
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


def test_members_are_on_the_page_of_their_class() -> None:
    listed = {path for group in GROUPS for path in hooks.classes_of(group).values()}
    assert "inherited_members: true" in hooks.class_page("ReplayBuffer", "samplebatch.ReplayBuffer", listed)
    vector = hooks.class_page("VectorReplayBuffer", "samplebatch.VectorReplayBuffer", listed)
    assert "inherited_members: false" in vector


def test_pictures_equal_the_output_of_the_script() -> None:
    sampled = pictures.draw_all()
    assert len(sampled) >= 22
    for name, text in sampled.items():
        assert (DOCS / "images" / name).read_text() == text, f"{name}: run make pictures"


def test_each_picture_is_on_a_page_for_both_themes() -> None:
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    for name in pictures.PICTURES:
        for theme in pictures.THEMES:
            assert f"images/{name}-{theme}.svg#only-{theme})" in text


def test_social_card_has_the_size_that_its_tags_state() -> None:
    header = (DOCS / "images" / "social-card.png").read_bytes()[:24]
    assert struct.unpack(">II", header[16:]) == pictures.CARD_SIZE
    tags = (DOCS / "overrides" / "main.html").read_text()
    assert [int(size) for size in re.findall(r'content="(\d+)"', tags)] == list(pictures.CARD_SIZE)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "guide").mkdir()
    (tmp_path / "index.html").write_text('<a href="guide/#top">a</a> <a href="https://example.org/x">b</a>')
    (tmp_path / "guide" / "index.html").write_text('<h1 id="top"></h1><img src="../ring.svg#only-light">')
    (tmp_path / "ring.svg").write_text("<svg/>")
    return tmp_path


def test_links_of_a_complete_site(site: Path) -> None:
    broken, counts = links.check(site)
    assert not broken
    assert counts == {"pages": 2, "internal": 2, "with an anchor": 1, "to other hosts": 1}


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("guide/#end", "no such anchor"),
        ("guides/", "no such file"),
        ("/ring.png", "no such file"),
        ("#x", "no such anchor"),
    ],
)
def test_broken_links_are_reported(site: Path, link: str, reason: str) -> None:
    with (site / "index.html").open("a") as page:
        page.write(f'<a href="{link}">c</a>')
    assert links.check(site)[0] == [f"index.html: {link}: {reason}"]
    assert link in str(links.main(str(site)))


def test_an_empty_folder_is_rejected_as_a_site(tmp_path: Path) -> None:
    assert "must contain a built site" in str(links.main(str(tmp_path)))


def test_root_files_are_pages_whose_links_exist() -> None:
    for source, name in hooks.ROOT_FILES.items():
        text = hooks.move_links((DOCS.parent / name).read_text())
        for link in re.findall(r"\]\(([\w./-]+\.md)(?:#[^)]*)?\)", text):
            target = (DOCS / source).parent / link
            assert target.exists() or target.relative_to(DOCS).as_posix() in hooks.ROOT_FILES, link


def test_version_of_the_site_is_the_package_version() -> None:
    assert versions.current_version() == samplebatch.__version__
    first = versions.listed([], "0.1.0")
    assert first == [{"version": "0.1", "title": "0.1.0", "aliases": ["latest"]}]
    assert versions.listed(first, "0.1.2") == [{"version": "0.1", "title": "0.1.2", "aliases": ["latest"]}]


WORDS = {"guarantees-in-detail.md": 7500, "benchmark-tables.md": 9000}  # the appendices of two short pages


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_pages_have_at_most_2000_words(page: Path) -> None:
    assert len(page.read_text().split()) <= WORDS.get(page.name, 2000)


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)
def test_code_of_pages_fits_88_columns(page: Path) -> None:
    is_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif is_code:
            assert len(re.sub(r"^(?:>>>|\.\.\.) ", "", line)) <= 88, f"{page.name}:{number}"


def test_code_of_example_files_fits_88_columns() -> None:
    for file in sorted((DOCS / "examples").glob("*.py")):
        assert max(len(line) for line in file.read_text().splitlines()) <= 88, file.name


def test_examples_of_docstrings_fit_88_columns() -> None:
    package = DOCS.parent / "samplebatch"
    checked = 0
    too_long = []
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if not is_definition or re.match(r"_(?!_)", node.name):
                continue
            for example in doctest.DocTestParser().get_examples(ast.get_docstring(node) or ""):
                checked += 1
                if max(map(len, example.source.splitlines())) > 88:
                    too_long.append(f"{file.relative_to(package)}:{node.name}: {example.source}")
    assert checked
    assert not too_long
