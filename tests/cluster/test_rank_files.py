"""Exceptions that come of files which every rank makes, or one alone."""

from __future__ import annotations

import pytest

from dtk.cluster import rank_files


@pytest.mark.parametrize(
    "last, says",
    [
        ("FileExistsError: [Errno 17] File exists: 'logs'", "os.makedirs(path, exist_ok=True)"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'm'", "broadcast_object(path)"),
        ("ValueError: File not found: filepath=/tmp/a/m.keras. Please ...", "tempfile.mkdtemp()"),
    ],
)
def test_the_last_exception_says_what_to_do(last, says):
    advice = rank_files.advice(["Traceback (most recent call last):", '  File "a"', last, ""], 1)
    assert says in advice and "`if strategy.is_chief:" in advice.replace(" os.mkdir(path)`", "")


def test_other_exceptions_say_nothing_of_files():
    assert rank_files.advice(["ValueError: no FileExistsError: here"], 1) is None
    assert rank_files.advice([], 1) is None


def test_what_was_handled_before_another_exception_says_nothing():
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'm'"
    assert rank_files.advice([missing, "", "ZeroDivisionError: division by zero"], 1) is None


@pytest.mark.parametrize("kind", ["FileExistsError: [Errno 17]", "FileNotFoundError: [Errno 2]"])
def test_where_no_checkpoint_can_be_written_other_ranks_are_not_blamed(kind):
    """A directory that is a file was said to have been made by another rank."""
    last = f"{kind} no checkpoint can be written (it is no directory); give another directory: 'c'"
    assert rank_files.advice([last], 1) is None


def test_what_rank_0_misses_no_other_rank_has_made():
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'm'"
    assert rank_files.advice([missing], 0) is None
