"""Pages of the site, as a hook of MkDocs: the repository's own, and a reference made of dtk itself.

A page has the path that it has in the repository, so its links lead where they lead on a code host.
What they lead to comes along: a page as a page, any other file as it is.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import griffe
from click.testing import CliRunner
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s:]+)(?:#[\w-]*)?\)")
DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent) *\S.*)*", re.MULTILINE)
# A line of docs/architecture.md's pictures: who is at work, or a step in a file.
STEP = re.compile(r"\s+(?P<path>\S+)\s+(?P<name>[\w.]+)(?:\s+(?P<does>.*))?")


class Doctests(griffe.Extension):
    """Shows as code what docstrings have to be run."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```",
                obj.docstring.value,
            )


def linked(page: Path) -> Iterator[Path]:
    """The files that a page links to."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in LINK.finditer(prose):
        yield (page.parent / found["target"]).resolve().relative_to(ROOT)


def on_config(config: MkDocsConfig) -> None:
    """Put the modules of dtk behind the other pages of the reference."""
    sys.path.insert(0, str(ROOT))
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    names = {name: f"reference/{name}.md" for name in modules()}
    reference.insert(1, {"Python": [{name: page} for name, page in names.items()]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages, what they link to, and the reference."""
    waiting = [Path("README.md"), Path("CHANGELOG.md")]
    waiting += sorted(one.relative_to(ROOT) for one in (ROOT / "docs").rglob("*.md"))
    added: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in added:
            continue
        added.add(path)
        files.append(File.generated(config, str(path), abs_src_path=str(ROOT / path)))
        if path.suffix == ".md":
            waiting += linked(ROOT / path)
    for name, module in modules().items():
        files.append(File.generated(config, f"reference/{name}.md", content=module_page(module)))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))


def modules() -> dict[str, ModuleType]:
    """The modules that have public names."""
    import dtk

    found = {"dtk": dtk, "dtk.errors": importlib.import_module("dtk.errors")}
    waiting = [dtk]
    while waiting:
        module = waiting.pop()
        parts = [getattr(module, name) for name in module.__all__]
        for part in filter(inspect.ismodule, parts):
            found[part.__name__] = part
            waiting.append(part)
    return dict(sorted(found.items()))


def module_page(module: ModuleType) -> str:
    """The public names of a module, each by its docstring."""
    name = module.__name__
    lines = [f"# {name}", "", inspect.getdoc(module) or "", ""]
    own = (one for one, value in vars(module).items() if inspect.getmodule(value) is module)
    for public in getattr(module, "__all__", None) or sorted(own):
        value = getattr(module, public)
        if inspect.ismodule(value) or public.startswith("_"):
            continue
        lines += [documented(public, value), ""]
    return "\n".join(lines)


def documented(name: str, value: object) -> str:
    """A name with its docstring, or its value."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"## {name}\n\n`{value!r}`"
    defined = ast.parse(inspect.getsource(sys.modules[value.__module__])).body
    if value.__name__ in {getattr(one, "name", "") for one in defined}:
        path = f"{value.__module__}.{value.__name__}"
        return f"::: {path}\n    options:\n      heading: {name}\n      toc_label: {name}"
    return f"## {name}\n\n{inspect.getdoc(value)}"  # made by another function


def commands_page() -> str:
    """Every command, by what it says of itself."""
    from dtk.cli.main import COMMANDS, main

    lines = ["# Commands", ""]
    for command in ([], *([name] for name in COMMANDS)):
        told = CliRunner().invoke(main, [*command, "--help"], prog_name="dtk", terminal_width=100)
        title = " ".join(["dtk", *command])
        lines += [f"## {title}", "", "```text", told.output.rstrip(), "```", ""]
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw the pictures of the architecture."""
    if page.file.src_uri != "docs/architecture.md":
        return markdown
    return re.sub(r"^```text\n(.*?)^```$", drawn, markdown, flags=re.MULTILINE | re.DOTALL)


def drawn(picture: re.Match[str]) -> str:
    """A picture of lines, as boxes below each other."""
    boxes = []
    for line in picture[1].splitlines()[1:]:
        if step := STEP.fullmatch(line):
            place, name, does = (html.escape(step[key] or "") for key in ("path", "name", "does"))
            boxes.append(f"<li><b>{name}</b> <code>{place}</code><br>{does}</li>")
        elif line:
            boxes.append(f'<li class="actor">{html.escape(line)}</li>')
    return f'<ol class="way">{"".join(boxes)}</ol>'
