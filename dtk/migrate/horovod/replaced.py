"""Names of Horovod that dtk does in another way."""

from __future__ import annotations

from typing import NoReturn

from dtk.errors import ReplacedError
from dtk.nests import Function


def replaced(name: str, cure: str) -> Function[NoReturn]:
    """Make a function that raises `ReplacedError` with what to write in its place."""

    def raising(*args: object, **kwargs: object) -> NoReturn:
        del args, kwargs
        raise ReplacedError(f"hvd.{name} is not in dtk.migrate.horovod: {cure}")

    raising.__name__ = raising.__qualname__ = name.rpartition(".")[2]
    raising.__doc__ = f"Raise `ReplacedError`: {cure}."
    raising.cure = cure  # type: ignore[attr-defined]
    return raising
