"""The habit of horovod_dataset_shard.py with the one line that dtk names: dtk.data.shard."""

import dtk
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(33)

data = load_digits()
dataset = tf.data.Dataset.from_tensor_slices(
    ((data.data[:50] / 16).astype("float32"), data.target[:50].astype("int64"))
)
dataset = dtk.data.shard(dataset, strategy, batch_size=16)

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )

history = model.fit(dataset, epochs=2, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
