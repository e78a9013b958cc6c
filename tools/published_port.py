"""Turns a published script into one for dtk, and into one that tells what it came to.

The three lines of docs/migrating.md, where a user would write them: the import and the strategy
after the script's own first imports, and a scope around each statement that compiles a model, or
loads one. `MirroredStrategy` and its like of TensorFlow become `dtk.auto_strategy`. A statement of
the script's top level that makes or removes folders becomes rank 0's, and the others wait, as dtk's
message says where every rank makes one.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

# What a script asks of models, and gets numbers for.
TOLD = ("fit", "evaluate", "predict")
SINGLE = ("train_on_batch", "test_on_batch", "predict_on_batch")
# What makes or removes folders and all that is in them, which only one process can.
MAKERS = ("mkdir", "makedirs", "rmtree", "copytree", "extractall")
# TensorFlow's own strategies, which dtk's stands for.
OTHERS = r"tf\.distribute\.(experimental\.)?(MultiWorker)?MirroredStrategy\([^)]*\)"
STRATEGY = "dtk.auto_strategy()"


def source_of(path: Path) -> str:
    """Return a script's text; of a notebook, that of its code cells without commands of a shell."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = "\n\n".join("".join(cell["source"]) for cell in cells).splitlines()
    return "\n".join(re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in lines) + "\n"


def shrunk(text: str, replace: list[list[str]], cut: list[list[str]]) -> str:
    """Return a script with strings replaced, and without what stands between pairs of others.

    Raises:
        ValueError: A string is not in the script.
    """
    for old, new in replace:
        if old not in text:
            raise ValueError(f"not in the script: {old!r}")
        text = text.replace(old, new)
    for begin, end in cut:
        if begin not in text:
            raise ValueError(f"not in the script: {begin!r}")
        before, after = text.split(begin, 1)
        if end and end not in after:
            raise ValueError(f"not in the script after {begin!r}: {end!r}")
        text = before + (end + after.split(end, 1)[1] if end else "")
    return text


def telling(text: str, epochs: int) -> str:
    """Return the script with `_seen(...)` around what it asks of models, and few epochs."""
    inserts: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse(text)):
        name = called(node)
        if not isinstance(node, ast.Call) or name not in TOLD + SINGLE or is_own(node):
            continue
        inserts += [(node.lineno, node.col_offset, "_seen("), (*end(node), ")")]
        for keyword in node.keywords:
            if keyword.arg in ("epochs", "num_epochs") and name == "fit":
                value = keyword.value
                inserts += [
                    (value.lineno, value.col_offset, "_few("),
                    (*end(value), f", {epochs})"),
                ]
    return with_inserts(text, inserts)


def plain(text: str) -> str:
    """Return the script without another strategy than TensorFlow's default."""
    return re.sub(OTHERS, "tf.distribute.get_strategy()", text)


def for_dtk(text: str, whole: bool = False) -> tuple[str, dict[str, int]]:
    """Return the script with dtk's lines, and how many are added, indented and changed for it."""
    lines = text.splitlines()
    changed = [re.sub(OTHERS, STRATEGY, line) for line in lines]
    counts = {"changed": sum(a != b for a, b in zip(lines, changed, strict=True))}
    has_one = any(STRATEGY in line for line in changed)
    changed, makers = of_rank_0(changed)
    tree = ast.parse("\n".join(changed))
    at = after_imports(tree)
    scopes = [] if has_one and "scope()" in text else sorted(compiling(tree))
    if whole:
        scopes = [(at + 1, len(changed))]
    for first, last in reversed(scopes):
        margin = re.match(r"\s*", changed[first - 1]).group()
        inside = within_strings(tree, first, last)
        changed[first - 1 : last] = [
            f"{margin}with strategy.scope():",
            *(
                line if number in inside or not line.strip() else f"    {line}"
                for number, line in enumerate(changed[first - 1 : last], first)
            ),
        ]
    added = ["import dtk"] if has_one else ["import dtk", "", f"strategy = {STRATEGY}"]
    changed[at:at] = added
    counts |= {
        "added": len([line for line in added if line]) + len(scopes) + 2 * makers,
        "indented": sum(last - first + 1 for first, last in scopes),
    }
    return "\n".join(changed) + "\n", counts


def of_rank_0(lines: list[str]) -> tuple[list[str], int]:
    """Return a script whose statements that make folders are rank 0's, and how many they are."""
    tree = ast.parse("\n".join(lines))
    makers = [
        statement
        for statement in tree.body
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        and any(called(part) in MAKERS for part in ast.walk(statement))
    ]
    found = list(lines)
    for statement in reversed(makers):
        first, last = statement.lineno - 1, statement.end_lineno
        own = [f"    {line}" for line in found[first:last]]
        found[first:last] = ["if strategy.is_chief:", *own, "strategy.communicator.barrier()"]
    return found, len(makers)


def called(node: ast.AST) -> str:
    """Return the name of the method that a node calls; empty if it calls none."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_method else ""


def is_own(call: ast.Call) -> bool:
    """Whether it is a method of `super()` or of something that is no model."""
    owner = call.func.value
    if isinstance(owner, ast.Call):
        return isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in ("re", "self")


def compiling(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of each statement that compiles or loads a model."""
    for node in ast.walk(tree):
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        for statement in [part for block in blocks if isinstance(block, list) for part in block]:
            if isinstance(statement, (ast.Expr, ast.Assign, ast.Return)) and any(
                called(part) in ("compile", "load_model") and not is_own(part)
                for part in ast.walk(statement)
            ):
                yield statement.lineno, statement.end_lineno


def after_imports(tree: ast.Module) -> int:
    """Return the number of the line after which dtk is imported: Keras's, and imports below it."""
    line = 0
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            line = statement.end_lineno
        elif line and of_keras(tree, line):
            break
    return line


def of_keras(tree: ast.Module, line: int) -> bool:
    """Whether Keras or TensorFlow is imported up to a line."""
    imports = [s for s in tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
    return any(
        "keras" in ast.unparse(s) or "tensorflow" in ast.unparse(s)
        for s in imports
        if s.lineno <= line
    )


def within_strings(tree: ast.AST, first: int, last: int) -> set[int]:
    """Return the lines that begin inside a string, which indenting would change."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
        and first <= getattr(node, "lineno", 0) <= last
        for line in range(node.lineno + 1, node.end_lineno + 1)
    }


def end(node: ast.expr) -> tuple[int, int]:
    """Return where a node ends: its line, and the column in bytes."""
    return node.end_lineno, node.end_col_offset


def with_inserts(text: str, inserts: list[tuple[int, int, str]]) -> str:
    """Return a text with others inserted, each at a line and a column in bytes."""
    lines = [line.encode() for line in text.splitlines()]
    for line, column, what in sorted(inserts, key=lambda i: i[:2], reverse=True):
        old = lines[line - 1]
        lines[line - 1] = old[:column] + what.encode() + old[column:]
    return b"\n".join(lines).decode() + "\n"
