"""What Python says about the strategies: dtk's arguments, not those of TensorFlow's classes."""

from __future__ import annotations

import inspect

import pytest
import tensorflow as tf

import dtk

CLASSES = [
    found
    for name in dtk.strategies.__all__
    if inspect.isclass(found := getattr(dtk.strategies, name))
]


@pytest.mark.parametrize("strategy", [c for c in CLASSES if issubclass(c, tf.distribute.Strategy)])
def test_the_constructor_has_no_docstring_of_tensorflow(strategy):
    """Had it none, Python would show the one it inherits, with a cluster_resolver."""
    assert inspect.getdoc(strategy.__init__).startswith("Take the arguments")
    assert "self" not in inspect.signature(strategy).parameters
