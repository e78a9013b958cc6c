"""What can be measured, known without TensorFlow, is what there is."""

import dataclasses
import doctest
import importlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.exchange.names import NAMES
from dtk.tuning.bench.models import PROBLEMS
from dtk.tuning.bench.setting import EXCHANGES, MODELS, BenchError, Setting, bytes_of, parse_size


def test_the_names_are_those_of_dtk():
    assert set(EXCHANGES) == {"none", *NAMES}
    assert set(MODELS) == set(PROBLEMS)


@given(
    st.builds(
        Setting,
        st.lists(st.sampled_from(MODELS)).map(tuple),
        st.lists(st.sampled_from(EXCHANGES)).map(tuple),
        *[st.integers(1, 10**6)] * 3,
        st.lists(st.integers(1, 10**6).map(lambda count: 4 * count)).map(tuple),
    )
)
def test_workers_read_what_the_command_line_wrote(setting):
    assert Setting.of(json.loads(json.dumps(dataclasses.asdict(setting)))) == setting
    sizes = [bytes_of(task) for task in setting.tasks]
    assert sizes == [0] * len(setting.models) + list(setting.allreduce)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"models": ("mlp", "vgg")},
            "--model vgg: unknown, expected resnet20, mlp, embedding or transformer",
        ),
        ({"exchanges": ("3bit",)}, "--exchange 3bit: unknown, expected none, fp16, bf16, 1bit,"),
        ({"batch_size": 0}, "--batch-size 0: expected 1 or more"),
        ({"steps": -1}, "--steps -1: expected 1 or more"),
        ({"rounds": 0}, "--rounds 0: expected 1 or more"),
        (
            {"allreduce": (6,)},
            "--allreduce 6: expected bytes of whole float32 numbers, such as 4kB",
        ),
    ],
)
def test_a_mistake_says_what_is_expected(given, message):
    with pytest.raises(BenchError, match=message):
        Setting(**given)


@pytest.mark.parametrize("text", ["", "4 kilobytes", "-4kB", "1e3", "kB"])
def test_a_size_that_is_none_says_what_is_expected(text):
    with pytest.raises(BenchError, match="expected a size, such as 4kB or 100MB"):
        parse_size(text)


@pytest.mark.parametrize("name", ["setting", "results", "report", "measure", "plot", "peers.turns"])
def test_the_examples_run(name):
    failed, attempted = doctest.testmod(importlib.import_module(f"dtk.tuning.bench.{name}"))
    assert attempted and not failed
