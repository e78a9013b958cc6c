"""What can be measured, known without TensorFlow, is what there is."""

import doctest
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.exchange.names import NAMES
from dtk.tuning.bench.models import PROBLEMS
from dtk.tuning.bench.setting import EXCHANGES, MODELS, BenchError, Setting


def test_the_names_are_those_of_dtk():
    assert set(EXCHANGES) == {"none", *NAMES}
    assert set(MODELS) == set(PROBLEMS)


@given(
    st.builds(
        Setting,
        st.lists(st.sampled_from(MODELS)).map(tuple),
        st.lists(st.sampled_from(EXCHANGES)).map(tuple),
        *[st.integers(1, 10**6)] * 3,
    )
)
def test_workers_read_what_the_command_line_wrote(setting):
    assert Setting.loads(setting.dumps()) == setting


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
    ],
)
def test_a_mistake_says_what_is_expected(given, message):
    with pytest.raises(BenchError, match=message):
        Setting(**given)


@pytest.mark.parametrize("name", ["setting", "results", "report"])
def test_the_examples_run(name):
    failed, attempted = doctest.testmod(importlib.import_module(f"dtk.tuning.bench.{name}"))
    assert attempted and not failed
