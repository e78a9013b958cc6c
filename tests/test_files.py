"""Files that are there are whole."""

import os
import threading

import pytest

from dtk.files import written


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    file = tmp_path / "file"
    file.write_text("before")
    with pytest.raises(RuntimeError, match="half-way"), written(file) as draft:
        draft.write_text("half")
        raise RuntimeError("half-way")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "before")]


def test_a_pipe_stays_one(tmp_path):
    """Broke as a draft took the place of any file: as root, `--report /dev/null` replaced it."""
    pipe, told = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: told.append(pipe.read_text()), daemon=True)
    reader.start()
    with written(pipe) as draft:
        draft.write_text("whole")
    reader.join(10)
    assert told == ["whole"]
    assert pipe.is_fifo()
