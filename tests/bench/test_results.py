"""What can be measured, known without TensorFlow, is what there is; what is saved comes back."""

import ast
import dataclasses
import doctest
import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.bench.bench_jobs import command
from dtk.bench.models import PROBLEMS
from dtk.bench.results import (
    EXCHANGES,
    MODELS,
    BenchError,
    BenchResults,
    Reading,
    Setting,
    bytes_of,
    parse_size,
    read,
)
from dtk.exchange import NAMES, BlockMomentum

NUMBERS = st.floats(0, 1e12)
STEPS = st.lists(NUMBERS, max_size=3).map(tuple)
READINGS = st.builds(Reading, NUMBERS, st.none() | NUMBERS, st.none() | NUMBERS, NUMBERS, STEPS)
TURNS = st.lists(st.lists(READINGS, min_size=2, max_size=2), max_size=3)
VARIANTS = st.sampled_from(("limit", "collective none", "torch ddp"))


@settings(max_examples=25)
@given(st.dictionaries(VARIANTS, TURNS), st.dictionaries(VARIANTS, st.text()))
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


def test_a_file_of_an_older_version_or_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "old").write_text('{"dtk bench": 2, "turns": {}}')
    with pytest.raises(BenchError, match="old was saved by an older dtk; measure anew"):
        read(tmp_path / "old")
    with pytest.raises(BenchError, match=r"cannot read .*nope: No such file or directory"):
        read(tmp_path / "nope")


def test_results_of_a_run_that_ended_before_anything_was_measured():
    """Ctrl-C while a peer was installed: a KeyError took the place of the code."""
    assert BenchResults().ended_early(["mlp"], "SIGINT").turns == {}


def test_the_names_are_those_of_dtk():
    assert set(EXCHANGES) == {"none", *NAMES} - {"auto", "32bit"}  # each is one of the others
    assert set(MODELS) == set(PROBLEMS)


@given(
    st.builds(
        Setting,
        st.lists(st.sampled_from(MODELS)).map(tuple),
        st.lists(st.sampled_from((*EXCHANGES, "block:1", "block:4096"))).map(tuple),
        *[st.integers(1, 10**6)] * 3,
        st.lists(st.integers(1, 10**6).map(lambda count: 4 * count)).map(tuple),
    )
)
def test_workers_read_what_the_command_line_wrote(setting):
    assert dataclasses.replace(Setting(), **ast.literal_eval(command("", setting)[-1])) == setting
    sizes = [bytes_of(task) for task in setting.tasks]
    assert sizes == [0] * len(setting.models) + list(setting.allreduce)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exchanges": ("block:0",)}, "--exchange block:0: unknown, .* 16bit or block:ROWS"),
        ({"exchanges": ("block:ROWS",)}, "--exchange block:ROWS: unknown, expected none"),
        ({"allreduce": (6,)}, "--allreduce 6: expected bytes of whole float32 numbers, such as 4"),
    ],
)
def test_a_mistake_says_what_is_expected(given, message):
    with pytest.raises(BenchError, match=message):
        Setting(**given)


@given(*[st.integers(1, 50)] * 3, st.integers(0, 5000))
def test_a_turn_is_of_whole_blocks_of_block_momentum(batch, steps, workers, more):
    exchange, setting = BlockMomentum(workers + more), Setting(batch_size=batch, steps=steps)
    found = setting.steps_with(f"block:{exchange.block_size}", workers)
    block, rows = 0, 0
    while rows < exchange.rows_in_block(workers):
        block, rows = block + 1, rows + batch * workers
    assert found % block == 0
    assert found - block < steps <= found
    assert setting.steps_with("1bit", workers) == steps


@pytest.mark.parametrize("text", ["", "4 kilobytes", "-4kB", "1e3", "kB"])
def test_a_size_that_is_none_says_what_is_expected(text):
    with pytest.raises(BenchError, match="expected a size, such as 4kB or 100MB"):
        parse_size(text)


@pytest.mark.parametrize(
    "name", ["results", "report", "turns", "bench_jobs", "worker", "variant", "page"]
)
def test_the_examples_run(name):
    failed, attempted = doctest.testmod(importlib.import_module(f"dtk.bench.{name}"))
    assert attempted and not failed
