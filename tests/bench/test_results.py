"""What is saved comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.bench.results import BenchResults, Reading, read
from dtk.bench.setting import BenchError

NUMBERS = st.floats(0, 1e12)
STEPS = st.lists(NUMBERS, max_size=3).map(tuple)
READINGS = st.builds(Reading, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, NUMBERS, STEPS)
TURNS = st.lists(st.lists(READINGS, min_size=2, max_size=2), max_size=3)
NAMES = st.sampled_from(("limit", "collective none", "torch ddp"))


@settings(max_examples=25)
@given(st.dictionaries(NAMES, TURNS), st.dictionaries(NAMES, st.text()))
def test_what_is_saved_comes_back(tmp_path_factory, variants, absent):
    results = BenchResults({"workers": 2}, {"mlp": 3}, {"mlp": variants}, absent)
    file = tmp_path_factory.mktemp("saved") / "run.json"
    results.save(file)
    assert read(file) == results


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "3", "{}", '{"dtk bench": 0}', '{"dtk bench": 99}', "\x00\xff"]
)
def test_a_file_that_is_something_else_is_refused(tmp_path, text):
    (tmp_path / "other").write_text(text, encoding="latin-1")
    with pytest.raises(BenchError, match="other is not a saved benchmark; expected what `dtk"):
        read(tmp_path / "other")


def test_a_file_of_an_older_version_says_so(tmp_path):
    (tmp_path / "old").write_text('{"dtk bench": 2, "turns": {}}')
    with pytest.raises(BenchError, match="old was saved by an older dtk; measure anew"):
        read(tmp_path / "old")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BenchError, match=r"cannot read .*nope: No such file or directory"):
        read(tmp_path / "nope")
