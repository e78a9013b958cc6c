"""Count what a reader has to walk through: `python tools/house.py`.

Lines and files, the fullest folder, the biggest file, how much is typed `Any`, which docstrings
have Args; and how many calls, in how many files, a batch and a gradient of two Dense layers make
inside dtk, with how many changes from one file to another.
"""

from __future__ import annotations

import ast
import contextlib
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dtk"


def main() -> None:
    """Print a table in Markdown."""
    files = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    lines = {path: len(text.splitlines()) for path, text in files.items()}
    folders: dict[Path, int] = {}
    for path in files:
        folders[path.parent] = folders.get(path.parent, 0) + 1
    fullest, biggest = max(folders, key=folders.__getitem__), max(lines, key=lines.__getitem__)
    trees = [ast.parse(text) for text in files.values()]
    rows = [
        ("lines / files", f"{sum(lines.values()):,} / {len(files)}"),
        ("median file / biggest", f"{statistics.median(lines.values()):.0f} / {lines[biggest]}"),
        ("", str(biggest.relative_to(ROOT))),
        ("files in the fullest folder", str(folders[fullest])),
        ("", str(fullest.relative_to(ROOT))),
        ("parameters that are `Any` or a bare `Callable`", _share(untyped(trees))),
        ("public functions with arguments whose docstring has Args", _share(with_args(trees))),
        *((f"{name}: calls / files / changes of file", walked) for name, walked in walks()),
    ]
    print("| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


def _share(found: tuple[int, int]) -> str:
    part, whole = found
    return f"{part} of {whole} = {part / whole:.0%}"


def _functions(trees: list) -> Iterator[ast.FunctionDef]:
    for tree in trees:
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    return [
        arg
        for arg in [*given.posonlyargs, *given.args, *given.kwonlyargs]
        if arg.arg not in ("self", "cls")
    ]


def untyped(trees: list) -> tuple[int, int]:
    """Count parameters whose type says nothing, and all parameters."""
    parameters = [arg for function in _functions(trees) for arg in _parameters(function)]
    types = [ast.unparse(arg.annotation) if arg.annotation else "" for arg in parameters]
    return sum(kind in ("", "Any", "Callable") for kind in types), len(types)


def with_args(trees: list) -> tuple[int, int]:
    """Count public functions and classes with arguments whose docstring lists them, and all."""
    documented, counted = 0, 0
    for tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            function = node if isinstance(node, ast.FunctionDef) else _constructor(node)
            if function is None or not _parameters(function):
                continue
            text = ast.get_docstring(node) or ""
            counted += 1
            documented += "Args:" in text or "Attributes:" in text
    return documented, counted


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    made = (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    return next(made, None)


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

    from dtk.trainer import epoch_data, model_scope

    strategy = dtk.strategies.MirroredStrategy(devices=2)
    with strategy.scope():
        layers = [keras.layers.Dense(4), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")
    model.fit(x, y, batch_size=8, verbose=0)  # what is made once is not counted
    batch, gradient = Walk(), Walk()
    trainer = model_scope.trainer_of(model)
    original = trainer.take_epoch_iterator

    def followed(*args: Any, **kwargs: Any) -> None:
        with batch.followed():
            original(*args, **kwargs)

    model._maybe_symbolic_build = followed
    opened = epoch_data.EpochDataset.__iter__

    def followed_opening(dataset: epoch_data.EpochDataset) -> Iterator:
        with batch.followed():
            return opened(dataset)

    epoch_data.EpochDataset.__iter__ = followed_opening
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
