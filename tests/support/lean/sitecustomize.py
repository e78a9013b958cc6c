"""Start processes without scikit-learn and matplotlib, which Keras imports only if they are there.

They take two of the seven CPU seconds in which a process starts. Python imports this file in every
process that has this folder in its PYTHONPATH (tests/conftest.py). Imports by scripts still work.
"""

import sys
from collections.abc import Sequence

OPTIONAL = ("matplotlib", "sklearn")


class _Absent:
    """The first finder of modules; it tells Keras alone that these are not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name in OPTIONAL and _importing_module().startswith("keras."):
            raise ModuleNotFoundError(name, name=name)


def _importing_module() -> str:
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith("<frozen importlib") and frame.f_back:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


sys.meta_path.insert(0, _Absent())  # type: ignore[arg-type]
