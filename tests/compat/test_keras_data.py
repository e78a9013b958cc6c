"""One pipeline reads the order of its rows from a variable, each time it is opened."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dtk.compat import keras_data


def opened(dataset):
    return [np.ravel(batch).tolist() for batch in dataset]


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_the_same_pipeline_gives_another_order_for_another_seed(shuffle):
    rows = np.arange(40)
    adapter = keras_data.ArrayDataAdapter(rows, batch_size=8, shuffle=shuffle)
    seed = tf.Variable(1, dtype=tf.int64)
    dataset = keras_data.shuffled_from(adapter, seed)
    first, again = opened(dataset), opened(dataset)
    seed.assign(2)
    other = opened(dataset)
    assert first == again != other
    assert sorted(sum(first, [])) == sorted(sum(other, [])) == rows.tolist()
    if shuffle == "batch":
        assert [sorted(batch) for batch in first] == rows.reshape(5, 8).tolist()
        orders = {tuple(np.array(batch) - min(batch)) for batch in first}
        assert len(orders) > 1, "each batch has an order of its own"
