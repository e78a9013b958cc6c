"""Count what a reader has to walk through: `python tools/house.py`.

Lines, with and without docstrings, comments and blanks; files; names that stand twice; protocols;
lines of tests and words of documents; and how many calls, in how many files, a batch and a gradient
of two Dense layers make inside dtk, with how many changes from one file to another.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import io
import os
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dtk"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def main() -> None:
    """Print a table in Markdown."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = [ast.parse(text) for text in texts.values()]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files = [path.name for path in texts if path.name != "__init__.py"]
    protocols = [c.name for c in classes if any("Protocol" in ast.unparse(b) for b in c.bases)]
    rows = [
        ("lines of code", f"{sum(code_lines(text) for text in texts.values()):,}"),
        ("lines", f"{sum(map(lines, texts.values())):,}"),
        ("files", str(len(texts))),
        ("longest file", max((lines(text), path.name) for path, text in texts.items())),
        ("class names that stand twice", twice(c.name for c in classes)),
        ("file names that stand twice", twice(files)),
        ("protocols", f"{len(protocols)}: {', '.join(sorted(protocols))}"),
        ("lines of tests", f"{sum(map(lines, tests)):,}"),
        ("words of documents", f"{sum(len(page.read_text().split()) for page in pages):,}"),
        *((f"{name}: calls / files / changes of file", walked) for name, walked in walks()),
    ]
    print("| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


def lines(text: str) -> int:
    """Return the number of lines of a file."""
    return text.count("\n")


def code_lines(text: str) -> int:
    """Return the number of lines with code: no docstrings, comments or blanks."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*NO_CODE, tokenize.ENDMARKER):
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def twice(names: Iterable[str]) -> str:
    """Return how many names stand more than once, and which."""
    counted = sorted(n for n, times in collections.Counter(names).items() if times > 1)
    return f"{len(counted)}: {', '.join(counted)}" if counted else "0"


class Walk:
    """Follow calls inside dtk while a function runs.

    Attributes:
        calls: Of functions of dtk.
        files: They are in.
        changes: From one file of dtk to another, returns included.
    """

    def __init__(self) -> None:
        self.calls = self.changes = 0
        self.files: set[str] = set()
        self._last: str | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of `sys.setprofile`."""
        if event == "return" and frame.f_back is not None:
            frame = frame.f_back
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(str(PACKAGE)):
            return
        if frame.f_code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"):
            return
        self.changes += file not in (self._last, None)
        self._last = file
        if event == "call":
            self.calls += 1
            self.files.add(file)

    def __str__(self) -> str:
        return f"{self.calls} / {len(self.files)} / {self.changes}"

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """While inside, follow calls of this thread."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def walks() -> list[tuple[str, Walk]]:
    """Follow a batch into `fit` and a gradient to the optimizer, on two logical devices."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import dtk  # noqa: I001  before keras, to keep TensorFlow's notes off the screen
    import keras
    import numpy as np

    from dtk.compat import keras_data
    from dtk.trainer import distributed_model

    strategy = dtk.strategies.MirroredStrategy(devices=2)
    with strategy.scope():
        layers = [keras.layers.Dense(4), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")
    model.fit(x, y, batch_size=8, verbose=0)  # what is made once is not counted
    batch, gradient = Walk(), Walk()
    trainer = distributed_model.trainer_of(model)
    original = trainer.take_epoch_iterator

    def followed(*args: Any, **kwargs: Any) -> None:
        with batch.followed():
            original(*args, **kwargs)

    model._maybe_symbolic_build = followed
    opened = keras_data.CutEpochIterator.opened

    def followed_opening(iterator: keras_data.CutEpochIterator, dataset: Any) -> Any:
        with batch.followed():
            return opened(iterator, dataset)

    keras_data.CutEpochIterator.opened = followed_opening
    apply = model.optimizer.apply

    def applied(*args: Any, **kwargs: Any) -> Any:
        with gradient.followed():
            return apply(*args, **kwargs)

    model.optimizer.apply = applied
    model.make_train_function(force=True)
    model.fit(x, y, batch_size=8, verbose=0)
    return [("a batch", batch), ("a gradient, two replicas", gradient)]


if __name__ == "__main__":
    main()
