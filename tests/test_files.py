"""Files that are there are whole."""

import pytest

from dtk.files import written


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    file = tmp_path / "file"
    file.write_text("before")
    with pytest.raises(RuntimeError, match="half-way"), written(file) as draft:
        draft.write_text("half")
        raise RuntimeError("half-way")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "before")]
