"""Reading the documentation: its fenced blocks, its commands, and its code in running text."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
FOLDERS = ("docs", "benchmarks/results")
FILES = sorted(
    [*(ROOT / page for page in PAGES), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))]
)

_FENCE = re.compile(r"```(?P<language>\w*)")
_SPAN = re.compile(r"(?<!`)(?P<ticks>`{1,2})(?!`)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)")
_NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        file: Relative to the repository.
        line: Of its fence.
        language: As its fence says; "" if it does not.
        text: What is in it.
    """

    file: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks_in(text: str, file: str) -> Iterator[Block]:
    """The fenced blocks of a page.

    Raises:
        ValueError: The last one does not end.
    """
    began, language, held = 0, "", []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.fullmatch(line.rstrip())
        if fence and not began:
            began, language, held = number, fence["language"], []
        elif fence and not fence["language"]:
            yield Block(file, began, language, "\n".join(held))
            began = 0
        elif began:
            held.append(line)
    if began:
        raise ValueError(f"{file}:{began}: this block has no end")


def all_blocks() -> list[Block]:
    """Those of every page."""
    return [
        block
        for file in FILES
        for block in blocks_in(file.read_text(), str(file.relative_to(ROOT)))
    ]


def commands(text: str) -> list[str]:
    """The commands of a shell block, one a line, without comments and continuations."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found, held = [], ""
    for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines()):
        held = f"{held}\n{line}".strip()
        if held and held.count("'") % 2 == held.count('"') % 2 == 0:
            found.append(held)
            held = ""
    return found


def words(command: str) -> list[str]:
    """The words of one command, up to what a shell would do with its output."""
    return shlex.split(command.partition(" | ")[0])


def spans_in(text: str) -> list[str]:
    """Code in running text and tables, outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [found["code"].strip() for found in _SPAN.finditer(re.sub(r"\n(?=\S)", " ", prose))]


def links_in(text: str) -> list[str]:
    """What a page links to."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [found["target"] for found in _LINK.finditer(prose)]


def missing_lines(shown: str, printed: str) -> list[str]:
    """Lines of an output in the documentation that a program did not print, but for its numbers."""
    lines = [line.strip() for line in shown.splitlines()]
    said = {_worded(line) for line in printed.splitlines()}
    return [line for line in lines if line and line != "..." and _worded(line) not in said]


def _worded(line: str) -> str:
    return " ".join(_NUMBER.sub("0", line).split())
