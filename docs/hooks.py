"""Hooks of the site's build: pages of classes and of files outside `docs`, and examples without prompts.

The pages in `docs/api` list the public names. These pages document functions; each class has a separate page, to which
its group's page links. If the base of a class is also listed, the page of the class shows only members that the base
lacks.
"""

from __future__ import annotations

import doctest
import inspect
import pydoc
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

API = "api"
ROOT_FILES = {"project/contributing.md": "CONTRIBUTING.md", "project/changelog.md": "CHANGELOG.md"}
"""Pages that are files of the repository's root."""
_NAME = re.compile(r"^::: (samplebatch[\w.]*\.([A-Z]\w*))$", re.MULTILINE)
_FENCE = re.compile(r"^```python\n(>>> .*?)^```$", re.MULTILINE | re.DOTALL)
_LISTING = re.compile(
    r'<div class="highlight"><pre><span></span><code>(<span class="gp">.*?)</code></pre></div>', re.DOTALL
)
_PROMPT = re.compile(r'^<span class="gp">(?:&gt;&gt;&gt;|\.\.\.) ?</span>')
_PARSER = doctest.DocTestParser()


def on_config(config: Any) -> Any:
    """Add the pages of classes to the navigation, below their group's page; without a repository, omit edit links."""
    if not config.repo_url:
        config.edit_uri = None
    docs = Path(config.docs_dir)
    for section in config.nav:
        if not isinstance(section, dict) or "Reference" not in section:
            continue
        for entry in section["Reference"]:
            title, page = next(iter(entry.items()))
            classes = classes_of(docs / page) if page.startswith(f"{API}/") else {}
            if classes:
                entry[title] = [page, *({name: place(page, name)} for name in classes)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each class of the groups, and for each file of `ROOT_FILES`."""
    docs = Path(config.docs_dir)
    for source, name in ROOT_FILES.items():
        page = File.generated(config, source, content=move_links((docs.parent / name).read_text()))
        page.edit_uri = f"../{name}"
        files.append(page)
    pages = sorted(docs.glob(f"{API}/*/index.md"))
    listed = {path for page in pages for path in classes_of(page).values()}
    for page in pages:
        for name, path in classes_of(page).items():
            source = place(page.relative_to(docs).as_posix(), name)
            files.append(File.generated(config, source, content=class_page(name, path, listed)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the classes of a group by links, and examples by code and outputs."""
    if page.file.src_uri.startswith(f"{API}/") and page.file.name == "index":
        for name, path in classes_of(Path(page.file.abs_src_path)).items():
            markdown = markdown.replace(f"::: {path}\n", f"{link(name, path)}\n")
    return _FENCE.sub(lambda match: without_prompts(match[1]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Split examples of docstrings into code and outputs."""
    return _LISTING.sub(lambda match: split_listing(match[1]), html)


def move_links(text: str) -> str:
    """Return the Markdown of a file in the root with links that are correct in a folder of `docs`.

    >>> move_links("[a](docs/a.md#b), [c](https://c.org), [log](CHANGELOG.md)")
    '[a](../a.md#b), [c](https://c.org), [log](changelog.md)'
    """
    text = re.sub(r"\]\(docs/", "](../", text)
    for source, name in ROOT_FILES.items():
        text = text.replace(f"]({name}", f"]({Path(source).name}")
    return text


def classes_of(page: Path) -> dict[str, str]:
    """Return the paths of the classes that a page lists, by name."""
    found = _NAME.findall(page.read_text())
    return {name: path for path, name in found if isinstance(pydoc.locate(path), type)}


def place(group: str, name: str) -> str:
    """Return the source of a class's page.

    >>> place("api/buffers/index.md", "ReplayBuffer")
    'api/buffers/ReplayBuffer.md'
    """
    return group.replace("index.md", f"{name}.md")


def class_page(name: str, path: str, listed: set[str]) -> str:
    """Return the Markdown of a class's page."""
    bases = inspect.getmro(pydoc.locate(path))[1:]
    has_listed_base = any(pydoc.locate(other) in bases for other in listed)
    return (
        f"---\ntitle: {name}\nsearch:\n  boost: 2\n---\n\n::: {path}\n    options:\n      heading_level: 1\n"
        f"      inherited_members: {str(not has_listed_base).lower()}\n"
    )


def link(name: str, path: str) -> str:
    """Return a line that links to a class's page, with the first sentence of its docstring."""
    summary = (inspect.getdoc(pydoc.locate(path)) or "").partition("\n")[0]
    return f"- [`{name}`]({name}.md): {summary}"


def without_prompts(block: str) -> str:
    r"""Return Markdown with separate blocks for the code of examples and their outputs.

    >>> print(without_prompts(">>> a = 1\n>>> a + 1\n2\n"))
    ```python
    a = 1
    a + 1
    ```
    <BLANKLINE>
    ```{ .text .output }
    2
    ```
    """
    parts: list[tuple[str, str]] = []
    for example in _PARSER.get_examples(block):
        if parts and parts[-1][0] == "code":
            parts[-1] = ("code", parts[-1][1] + example.source)
        else:
            parts.append(("code", example.source))
        if example.want:
            parts.append(("output", example.want))
    fences = {"code": "```python", "output": "```{ .text .output }"}
    return "\n\n".join(f"{fences[kind]}\n{text.rstrip()}\n```" for kind, text in parts)


def split_listing(code: str) -> str:
    """Return the HTML of an interactive listing as blocks of code and blocks of output."""
    parts: list[tuple[bool, list[str]]] = []
    for line in code.rstrip("\n").split("\n"):
        is_code = _PROMPT.match(line) is not None
        if not parts or parts[-1][0] != is_code:
            parts.append((is_code, []))
        parts[-1][1].append(_PROMPT.sub("", line) if is_code else line)
    blocks = []
    for is_code, lines in parts:
        kind = "highlight" if is_code else "output highlight"
        text = "\n".join(lines)
        blocks.append(f'<div class="{kind}"><pre><span></span><code>{text}\n</code></pre></div>')
    return "\n".join(blocks)
