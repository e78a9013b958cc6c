"""A script that is to be changed: questions about it, and edits of its text."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterator
from typing import TypeVar

import libcst as cst
from libcst import metadata

MARK = "# dtk migrate: "
PAGE = "docs/migrating.md"
_Node = TypeVar("_Node", bound=cst.CSTNode)
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
# Comments that go with a line that goes.
_OF_HOROVOD = re.compile(r"horovod|\bhvd\b|\bpin\b", re.IGNORECASE)
# Edits of one place are made in this order: lines of their own, marks, removed lines, other text,
# indents.
OWN, MARKS, LINE, TEXT, INDENT = range(5)
Edit = tuple[int, int, int, str]  # first, last, order, text
_DATASETS = re.compile(r"Dataset\b|dataset_from_directory$|^tfds\.load$")


def code(node: cst.CSTNode | None) -> str:
    """Return the text of an expression."""
    return cst.Module([]).code_for_node(node).strip() if node is not None else ""


def method(call: cst.Call) -> str:
    """Return the name of the method that is called; empty for a function."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def argument(call: cst.Call, name: str, place: int | None = None) -> cst.BaseExpression | None:
    """Return the value of the argument with a name, or at a place."""
    for index, arg in enumerate(call.args):
        if arg.keyword.value == name if arg.keyword else index == place and not arg.star:
            return arg.value
    return None


def alone(line: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """Return the one statement of a line; None if there are several, or it is compound."""
    single = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    return line.body[0] if single and isinstance(line, cst.SimpleStatementLine) else None


def assigned(node: cst.CSTNode) -> tuple[str, cst.BaseExpression | None]:
    """Return the one target of a line that is an assignment, and its value."""
    only = alone(node) or node
    if isinstance(only, cst.Assign) and len(only.targets) == 1:
        return code(only.targets[0].target), only.value
    return "", None


class Source:
    """A script, and what is to be changed in it.

    Edits are spans of the text and what stands there instead; one within another counts for
    nothing, so that parts of an expression are changed without regard to the whole.
    """

    def __init__(self, text: bytes) -> None:
        try:
            wrapper = metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        except (cst.ParserSyntaxError, UnicodeError) as error:
            ast.parse(text)  # knows the place better
            raise SyntaxError(str(error)) from error
        self.module = wrapper.module
        self.text = self.module.code
        self.lines = self.text.split("\n")
        self.strategy = "strategy"
        self.steps: set[str] = set()  # functions that are called by `strategy.run`
        self.notes: dict[str, None] = {}
        self.deleted: dict[cst.CSTNode, int] = {}  # where what follows begins
        self._marks: dict[tuple[int, str], None] = {}
        self._edits: list[Edit] = []
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._places = wrapper.resolve(metadata.PositionProvider)
        ends = [match.end() for match in re.finditer("\n", self.text)]
        self._starts = [0, *ends, len(self.text), len(self.text)]
        self._values: dict[str, list[cst.BaseExpression | None]] = {}
        spans = {node: self.span(node) for node in self._places}
        self._nodes = sorted(spans, key=lambda node: (spans[node][0], -spans[node][1]))
        self._begins = [spans[node][0] for node in self._nodes]
        self.calls = self.find(cst.Call)
        targets = (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.Param)
        for node in [one for one in self._nodes if isinstance(one, targets)]:
            name, value = assigned(self._parents[node])
            target = node.name if isinstance(node, cst.Param) else node.target
            named = [*self.find(cst.Name, target), *self.find(cst.Attribute, target)]
            for each in map(code, named):  # None is a value that is not shown
                self._values.setdefault(each, []).append(value if name == each else None)

    # Questions.

    def find(self, kind: type[_Node], within: cst.CSTNode | None = None) -> list[_Node]:
        """Return all nodes of a kind, in their order; those within another, and that itself."""
        first, last = self.span(within) if within is not None else (0, len(self.text))
        start, stop = bisect.bisect_left(self._begins, first), bisect.bisect(self._begins, last)
        nodes = [one for one in self._nodes[start:stop] if isinstance(one, kind)]
        if within is None:
            return nodes
        return [one for one in nodes if one is within or within in self.parents(one)]

    def code(self, node: cst.CSTNode) -> str:
        """Return the text of a node, as it stands in the script."""
        first, last = self.span(node)
        return self.text[first:last].strip()

    def imported(self, node: cst.CSTNode) -> str:
        """Return the full name of what an expression names, if it was imported."""
        names = self._names.get(node, ())
        known = names() if callable(names) else names
        source = metadata.QualifiedNameSource.IMPORT
        return next((one.name for one in known if one.source is source), "")

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield what a node is in, the innermost first."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the innermost function that a node is in."""
        return next((one for one in self.parents(node) if isinstance(one, cst.FunctionDef)), None)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the innermost statement that a node is in."""
        return next(one for one in (node, *self.parents(node)) if isinstance(one, Statement))

    def line(self, node: cst.CSTNode) -> int:
        """Return the line on which a node begins; the first is 0."""
        return self._places[node].start.line - 1

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return where the text of a node begins and ends."""
        first, last = self._places[node].start, self._places[node].end
        begin = self._starts[first.line - 1] + first.column
        return begin, self._starts[last.line - 1] + last.column

    def assignments(self, name: str) -> list[cst.BaseExpression]:
        """Return the values that a name is given, those that the script shows."""
        return [one for one in self._values.get(name, ()) if one is not None]

    def values(self, name: str) -> list[cst.BaseExpression]:
        """Return all that a name is given; nothing if the script does not show it all."""
        return [] if None in self._values.get(name, ()) else self.assignments(name)

    def resolved(self, value: cst.BaseExpression | None) -> cst.BaseExpression | None:
        """Return the value of a name that is assigned once; other expressions as they are."""
        values = self.values(value.value) if isinstance(value, cst.Name) else []
        return self.resolved(values[0]) if len(values) == 1 else value

    def dataset(self, value: cst.BaseExpression | None, seen: tuple[str, ...] = ()) -> set[str]:
        """Return the calls that make a `tf.data.Dataset`; none if the script shows none."""
        if isinstance(value, cst.Name):
            if value.value in seen:
                return {value.value}
            calls = [self.dataset(one, (*seen, value.value)) for one in self.values(value.value)]
            return set().union(*calls) if all(calls) else set()
        if not isinstance(value, cst.Call):
            return set()
        of = value.func.value if isinstance(value.func, cst.Attribute) else None
        known = self.dataset(of, seen) or set(_DATASETS.findall(code(value.func)))
        return {method(value), *known} if known else known

    # Edits.

    def note(self, text: str) -> None:
        """Tell what was done, once."""
        self.notes[text] = None

    def mark(self, node: cst.CSTNode, why: str, section: str) -> None:
        """Put a comment above the statement of a node."""
        text = f"{MARK}{why}; see {PAGE}#{section}"
        self._marks[self.line(self.statement(node)), text] = None

    def replace(self, first: int, last: int, text: str = "", order: int = TEXT) -> None:
        """Put another text into the place of a span."""
        self._edits.append((first, last, order, text))

    def write(self, node: cst.CSTNode, text: str) -> None:
        """Put another text into the place of a node."""
        self.replace(*self.span(node), text)

    def keep(self, node: cst.CSTNode, part: cst.CSTNode, before: str = "", after: str = "") -> None:
        """Leave a part of an expression in its place, between two texts."""
        (first, last), (begin, end) = self.span(node), self.span(part)
        self.replace(first, begin, before)
        self.replace(end, last, after)

    def multiply(self, value: cst.BaseExpression, factor: str) -> None:
        """Multiply an expression."""
        plain = isinstance(value, cst.Name | cst.Attribute | cst.Integer) and not value.lpar
        self.around(value, *(("", f" * {factor}") if plain else ("(", f") * {factor}")))

    def margin(self, line: int) -> str:
        """Return the space at the beginning of a line."""
        return self.lines[line][: len(self.lines[line]) - len(self.lines[line].lstrip())]

    def insert(self, line: int, text: str, order: int = TEXT) -> None:
        """Put lines before a line."""
        self.replace(self._starts[line], self._starts[line], text, order)

    def delete(self, statement: cst.CSTNode, text: str = "") -> None:
        """Remove a statement, with comments above it that speak of Horovod."""
        first, last = self.line(statement), self.end(statement)
        lines, top = self.lines, first
        while top and lines[top - 1].lstrip().startswith("#"):
            top -= 1
        first = top if _OF_HOROVOD.search("\n".join(lines[top:first])) else first
        self.deleted[statement] = self._starts[last]
        self.replace(self._starts[first], self.deleted[statement], text, LINE)

    def delete_emptied(self) -> None:
        """Remove conditions and loops of which nothing is left; other blocks must not be empty."""
        for block in reversed(self.find(cst.IndentedBlock)):
            body = block.body
            if not all(one in self.deleted for one in body):
                continue
            owner = self._parents[block]
            if isinstance(owner, cst.If | cst.For) and owner.orelse is None:
                self.delete(owner)
            else:
                margin = " " * self._places[body[0]].start.column
                end = self.deleted[body[-1]]
                self.replace(end, end, f"{margin}pass\n")

    def delete_element(self, element: cst.CSTNode) -> None:
        """Remove an element of a list, or an argument, with the comments above it."""
        owner = self._parents[element]
        parts = (
            owner.elements if isinstance(owner, cst.List) else cst.ensure_type(owner, cst.Call).args
        )
        place = parts.index(element)
        before, last = self.span(element)
        first = self.span(parts[place - 1])[1] if place else before
        comma = re.match(r"\s*,", self.text[last:])
        self.deleted[element] = last
        if isinstance(owner, cst.List) and all(one in self.deleted for one in parts):
            self.replace(self.span(owner)[0] + 1, self.span(owner)[1] - 1)
        elif comma:
            gap = re.match(r",?[ \t]*(#.*)?", self.text[first:]) if place else None
            if isinstance(owner, cst.List) and not place:
                first = self.span(owner)[0] + 1
            self.replace(first + (gap.end() if gap else 0), last + comma.end())
        else:
            self.replace(first, last)

    def unwrap(self, block: cst.If, last: cst.CSTNode) -> None:
        """Leave the body of a condition in its place."""
        inner = self.end(block.test)
        self.replace(self._starts[self.line(block)], self._starts[inner], "", LINE)
        self.indent(inner, self.end(last), -1)

    def end(self, node: cst.CSTNode) -> int:
        """Return the line after a node."""
        place = self._places[node].end
        return place.line - (place.column == 0)

    def around(self, node: cst.CSTNode, before: str, after: str) -> None:
        """Put texts before and behind an expression."""
        first, last = self.span(node)
        self.replace(first, first, before)
        self.replace(last, last, after)

    def indent(self, first: int, last: int, by: int) -> None:
        """Move lines to the right, or to the left; not those that begin in a string."""
        unit = self.module.default_indent
        texts = [*self.find(cst.SimpleString), *self.find(cst.FormattedString)]
        places = [self._places[one] for one in texts]
        within = {n for one in places for n in range(one.start.line, one.end.line)}
        for number in range(first, last):
            if number not in within and self.lines[number].strip():
                start = self._starts[number]
                self.replace(start, start + (0 if by > 0 else len(unit)), unit * (by > 0), INDENT)

    def is_edited(self, node: cst.CSTNode) -> bool:
        """Whether a node's text is replaced."""
        first, last = self.span(node)
        return any(a <= first and last <= b and a < b for a, b, _, _ in self._edits)

    def result(self) -> bytes:
        """Return the changed text."""
        for line in {line for line, _ in self._marks}:
            here = {order: text for at, _, order, text in self._edits if at == self._starts[line]}
            margin = self.margin(line) + ("" if TEXT in here else here.get(INDENT, ""))
            texts = [f"{margin}{text}\n" for at, text in self._marks if at == line]
            self.insert(line, "".join(texts), MARKS)
        edits = sorted(dict.fromkeys(self._edits), key=lambda e: (e[0], e[1] > e[0], e[2]))
        done, end = "", 0
        for edit in edits:
            if any(_hides(other, edit) for other in edits):
                continue
            done += self.text[end : edit[0]] + edit[3].replace("\n", self.module.default_newline)
            end = edit[1]
            gone = edit[2] == LINE and not edit[3] and done.endswith("\n\n")
            end += gone and self.text[end:].startswith("\n")  # one blank line where two would meet
        return (done + self.text[end:]).encode(self.module.encoding)


def _hides(one: Edit, other: Edit) -> bool:
    """Whether an edit is within another. What is inserted before a deleted line may be of it."""
    (first, last, order, _), (begin, end, kind, _) = one, other
    if begin < end:
        return first <= begin and end <= last and (first, last) != (begin, end)
    of_line = order == LINE and kind not in (OWN, TEXT)
    return first + (not of_line) <= begin < last
