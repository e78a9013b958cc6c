"""What a scope keeps of a script that clears Keras's state inside it."""

from __future__ import annotations

import keras
import tensorflow as tf

from dtk.strategies import AllReduceStrategy
from dtk.trainer import model_scope

from strategies import cases


def test_clearing_keras_inside_a_scope_does_not_leave_it():
    """Breaks as keras_tuner's search, whose models would be made outside, and then fails."""
    strategy = AllReduceStrategy("local")
    with strategy.scope():
        keras.utils.clear_session()
        assert tf.distribute.get_strategy() is strategy
        model = cases.small()
        model.compile(optimizer="sgd", loss="mse")
    assert not tf.distribute.has_strategy()
    assert model_scope.trainer_of(model).strategy is strategy
