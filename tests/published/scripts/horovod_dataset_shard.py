"""A habit of Horovod's users: each worker trains on its own shard of a dataset.

dtk cuts global batches itself, and would leave out half of each shard.
"""

import dtk
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(33)

data = load_digits()
dataset = tf.data.Dataset.from_tensor_slices(
    ((data.data[:64] / 16).astype("float32"), data.target[:64].astype("int64"))
)
dataset = dataset.shard(strategy.size, strategy.rank)
dataset = dataset.shuffle(64).batch(16 // strategy.size)

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )

history = model.fit(dataset, epochs=2, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
