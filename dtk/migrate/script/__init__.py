"""`dtk migrate`: a script of Keras, Horovod or `tf.distribute` in dtk's own names.

    horovod_names -> tensorflow_names -> scopes -> the edits of the source

It changes what it understands; the rest gets a comment on the line above, and stays.
"""

from __future__ import annotations

import ast
import dataclasses

import libcst as cst

from dtk.migrate.script import horovod_names, scopes, tensorflow_names
from dtk.migrate.script.source import MARK, PAGE, Source, code

# What dtk does not train, by the packages that are imported.
_OTHERS = {"chainermn": "ChainerMN", "chainer": "Chainer", "torch": "PyTorch", "mxnet": "MXNet"}
_OURS = {"keras", "tensorflow", "tf_keras"}


@dataclasses.dataclass(frozen=True)
class Migration:
    """A migrated script.

    Attributes:
        text: The script, as bytes in its own encoding.
        notes: What was done that is worth knowing.
        refusal: Why nothing was changed; empty if the script was migrated.
        is_done: Whether the script used dtk before.
    """

    text: bytes
    notes: tuple[str, ...] = ()
    refusal: str = ""
    is_done: bool = False

    @property
    def marks(self) -> list[tuple[int, str]]:
        """What is left to the user: the number of each marked line, and why."""
        lines = self.text.decode("utf-8", "replace").splitlines()
        marks, waiting = [], []
        for number, line in enumerate(lines, 1):
            if line.strip().startswith(MARK):
                waiting.append(line.strip().removeprefix(MARK))
            elif waiting and line.strip():
                marks += [(number, why) for why in waiting]
                waiting = []
        return marks


def migrate(text: bytes) -> Migration:
    """Migrate a script.

    Args:
        text: The script, as bytes in its own encoding.

    Returns:
        The migrated script, and what is to be told.

    Raises:
        SyntaxError: The script is not Python.
        RuntimeError: What was made of it is not Python.
    """
    source = Source(text)
    packages = _packages(source)
    if "dtk" in packages:
        return Migration(text, refusal="it uses dtk already", is_done=True)
    others = [name for package, name in _OTHERS.items() if package in packages]
    if others and not packages & _OURS:
        message = f"it is a script of {others[0]}, and dtk trains models of Keras; see "
        message += f"{PAGE}#other-frameworks"
        return Migration(text, refusal=message)
    taken = {name.value for name in source.find(cst.Name)}
    source.strategy = "dtk_strategy" if "strategy" in taken else "strategy"
    made, growth = None, False
    if "horovod" in packages:
        made, growth = horovod_names.rewrite(source)
    tensorflow_names.rewrite(source)
    scopes.rewrite(source, made, horovod_names.strategy_line(source.strategy, growth))
    result = source.result()
    try:
        ast.parse(result)
    except SyntaxError as error:
        ast.parse(text)  # Python of another version
        message = (
            f"what would be its line {error.lineno} is not Python ({error.msg}): a fault of dtk's"
        )
        raise RuntimeError(f"{message}, not of the script; please report it") from error
    trains = b"import dtk" in result
    if result == text or ("horovod" in packages and not trains):
        message = "it compiles no model, applies no gradients, and uses neither Horovod nor "
        return Migration(text, refusal=f"{message}tf.distribute; migrate the file that does")
    return Migration(result, tuple(source.notes))


def _packages(source: Source) -> set[str]:
    """Return the packages that are imported anywhere in a script."""
    packages = set()
    for one in source.find(cst.Import):
        packages |= {alias.evaluated_name.split(".")[0] for alias in one.names}
    for each in source.find(cst.ImportFrom):
        if not each.relative:
            packages.add(code(each.module).split(".")[0])
    return packages
