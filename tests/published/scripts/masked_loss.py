"""After TensorFlow's tutorials on text (image_captioning, nmt_with_attention, transformer).

Loss and metric are functions given to `compile` that divide a sum over words by their number.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(26)


def masked_loss(y_true, y_pred):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_fn(y_true, y_pred)
    mask = tf.cast(y_true != 0, loss.dtype)
    loss *= mask
    return tf.reduce_sum(loss) / tf.reduce_sum(mask)


def masked_acc(y_true, y_pred):
    match = tf.cast(tf.cast(y_true, tf.int64) == tf.argmax(y_pred, axis=-1), tf.float32)
    mask = tf.cast(y_true != 0, tf.float32)
    return tf.reduce_sum(match * mask) / tf.reduce_sum(mask)


rng = np.random.default_rng(26)
source = rng.integers(1, 20, (50, 6))
target = 1 + source[:, ::-1] % 10
target[np.arange(6) >= rng.integers(1, 7, (50, 1))] = 0

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Embedding(20, 8), keras.layers.Dense(11)]
    )
    model.compile(optimizer=keras.optimizers.Adam(), loss=masked_loss, metrics=[masked_acc])

history = model.fit(source, target, batch_size=16, epochs=2, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
