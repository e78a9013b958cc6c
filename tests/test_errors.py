"""Exceptions that come of files which every rank makes, or one alone; lines of scripts."""

from __future__ import annotations

import inspect

import pytest

from dtk.errors import advice_on_files, script_line

MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'm'"


@pytest.mark.parametrize(
    "last, says",
    [
        ("FileExistsError: [Errno 17] File exists: 'logs'", "os.makedirs(path, exist_ok=True)"),
        (MISSING, "broadcast_object(path)"),
        ("ValueError: File not found: filepath=/tmp/a/m.keras. Please ...", "tempfile.mkdtemp()"),
        ("a.errors_impl.DataLossError: corrupted record at 24", "writing that file just now"),
        ("zipfile.BadZipFile: File is not a zip file", "writing that file just now"),
        ("BlockingIOError: [Errno 11] Unable to create file (unable to lock", "barrier()"),
        ("sqlite3.OperationalError: database is locked", "writing that file just now"),
        ("errors_impl.NotFoundError: a/b.h5; No such file or directory", "broadcast_object(path)"),
    ],
)
def test_the_last_exception_says_what_to_do(last, says):
    advice = advice_on_files(["Traceback (most recent call last):", '  File "a"', last, ""], 1)
    assert says in advice and "`if strategy.is_chief:" in advice.replace(" os.mkdir(path)`", "")


@pytest.mark.parametrize(
    "rank, words",
    [
        (1, ["ValueError: no FileExistsError: here"]),
        (1, ["a.b.errors_impl.NotFoundError: Resource localhost/table does not exist."]),
        (1, ["EOFError: EOF when reading a line"]),  # of input()
        (1, []),
        # what was handled before another exception
        (1, [MISSING, "", "ZeroDivisionError: division by zero"]),
        # a directory that is a file was said to have been made by another rank
        (1, ["FileExistsError: [Errno 17] no checkpoint can be written (it is no directory)"]),
        (1, ["FileNotFoundError: [Errno 2] no checkpoint can be written (...); give another"]),
        # what rank 0 misses, no other rank has made
        (0, [MISSING]),
    ],
)
def test_no_other_rank_is_blamed(rank, words):
    assert advice_on_files(words, rank) is None


def test_a_line_of_the_script_is_none_of_pythons_own():
    """As where a property that functools keeps calls dtk."""
    call = eval(compile("lambda function: function()", inspect.__file__, "eval"))
    assert call(script_line).startswith(f"{__file__}:")
