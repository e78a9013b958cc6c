"""What is printed by rank 0 arrives, and what is saved comes back."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.tuning.bench.results import Reading, Results, line, read
from dtk.tuning.bench.setting import BenchError

NUMBERS = st.floats(0, 1e12)
READINGS = st.builds(Reading, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
TURNS = st.lists(st.lists(READINGS, min_size=2, max_size=2), max_size=3)


@given(st.dictionaries(st.sampled_from(("limit", "none", "1bit")), TURNS))
def test_every_turn_printed_is_taken_and_saved(tmp_path_factory, contenders):
    results = Results()
    assert results.take("[0] " + line({"setting": {"workers": 2}}) + "\n")
    assert results.take(line({"allreduce": 4096, "seconds": [0.5, 0.25]}))
    assert results.take(line({"model": "mlp", "parameters": 3}))
    for contender, turns in contenders.items():
        for turn in turns:
            record = {"contender": contender, "turn": [dataclasses.asdict(one) for one in turn]}
            assert results.take("[ 0] " + line({"model": "mlp", **record}) + "\n")
    printed = {name: turns for name, turns in contenders.items() if turns}
    assert results == Results({"workers": 2}, {"mlp": 3}, {"mlp": printed}, {4096: [0.5, 0.25]})
    file = tmp_path_factory.mktemp("saved") / "run.json"
    results.save(file)
    assert read(file) == results


def test_runs_saved_before_there_were_allreduces_are_read(tmp_path):
    results = Results({"workers": 2}, {"mlp": 3}, {"mlp": {}})
    results.save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())
    del saved["allreduces"]
    (tmp_path / "run.json").write_text(json.dumps(saved))
    assert read(tmp_path / "run.json") == results


def test_what_libraries_print_is_not_taken():
    results = Results()
    assert not results.take("[0] epoch 1/2\n")
    assert results == Results()


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "{}", '{"dtk bench": 0}', "\x00\xff"])
def test_a_file_that_is_something_else_is_refused(tmp_path, text):
    (tmp_path / "other").write_text(text, encoding="latin-1")
    with pytest.raises(BenchError, match="other is not a saved benchmark; expected what `dtk"):
        read(tmp_path / "other")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BenchError, match=r"cannot read .*nope: No such file or directory"):
        read(tmp_path / "nope")
