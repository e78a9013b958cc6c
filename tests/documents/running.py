"""Runs Python blocks of the documentation on every rank."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile


def executed(*sources: str) -> str:
    """Run programs one after the other, in the same names and a new folder.

    Args:
        sources: Python; `communicator` is this world's.

    Returns:
        What they printed.
    """
    names = {"__name__": "__main__", "communicator": os.environ["DTK_TEST_COMMUNICATOR"]}
    printed, before = io.StringIO(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        os.chdir(folder)
        try:
            for source in sources:
                exec(compile(source, "documentation", "exec"), names)
        finally:
            os.chdir(before)
    return printed.getvalue()
