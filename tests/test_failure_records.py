"""What is recorded of the exception that ends a rank."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from dtk.cluster import failures
from dtk.errors import failure_record, traceback_pieces


def raised(code, name="train.py"):
    """What a script of a rank raises."""
    try:
        exec(compile(textwrap.dedent(code), name, "exec"), {})
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


class UnavailableError(Exception):
    """As TensorFlow's."""


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("code", "place", "lost"),
    [
        ("\nraise ValueError('boom')", ("train.py", 2), False),
        # the innermost call of the script's own, not the library's that raised
        ("import json\n\njson.loads('{')", ("train.py", 3), False),
        ("def f(:", ("train.py", 1), False),
        ("raise ConnectionError('Connection reset by peer')", ("train.py", 1), True),
        (
            "try:\n    raise OSError('Socket closed')\n"
            "except OSError as e:\n    raise RuntimeError('no step') from e",
            ("train.py", 4),
            True,
        ),
        (
            "try:\n    raise OSError('Socket closed')\n"
            "except OSError:\n    raise RuntimeError('no step') from None",
            ("train.py", 4),
            False,
        ),
    ],
)
def test_the_script_s_line_and_whether_a_peer_is_gone(code, place, lost):
    record = failure_record(raised(code))
    assert (record["file"], record["line"]) == place
    assert record["lost_peer"] is lost


def test_a_peer_is_gone_by_the_type_of_an_exception_too():
    assert failure_record(UnavailableError("from worker"))["lost_peer"] is True


def test_an_exception_without_text_is_recorded():
    """Breaks as an error in `sys.excepthook`, in place of the script's traceback."""
    assert failure_record(Mute())["message"] == "(it has no text)"


def test_a_record_fits_into_reports_whatever_it_says():
    """Over ssh a longer report than PIPE_BUF would be torn by what the rank writes."""
    error = raised(f"raise ValueError({'ä' * 20_000!r})")
    assert failures.read(failure_record(error)).message.endswith("ä ...")
    pieces = traceback_pieces(error)
    assert all(len(piece) <= 600 for piece in pieces) and len(pieces) <= 16
    assert "".join(pieces).startswith("Traceback (most recent call last):")


HOOKED = """
import sys
def hook(kind, error, trace):
    print("own hook:", error, file=sys.stderr)
{when}
raise ValueError("boom")
"""


@pytest.mark.parametrize("when", ["", "sys.excepthook = hook"], ids=["python's", "the script's"])
def test_a_hook_of_the_script_runs_and_the_launcher_knows_all_the_same(tmp_path, when):
    (tmp_path / "train.py").write_text(HOOKED.format(when=when))
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "1", "train.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.count("[0] own hook: boom") == bool(when)
    assert done.stderr.count("[0] Traceback") == (not when)
    assert "failed first, with exit code 1 at train.py:6." in done.stderr
    assert done.stderr.endswith("ValueError: boom\n")
