"""After Horovod's examples/tensorflow2/tensorflow2_keras_mnist.py, moved to dtk.

The rate is not scaled here, so that one process can be compared; MetricAverageCallback has no
counterpart, since metrics are those of all workers anyway.
"""

import dtk
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(32)

data = load_digits()
dataset = tf.data.Dataset.from_tensor_slices(
    (
        tf.cast(data.images[:50, ..., None] / 16.0, tf.float32),
        tf.cast(data.target[:50], tf.int64),
    )
)
dataset = dataset.repeat().shuffle(10000).batch(16)

with strategy.scope():
    mnist_model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(4, [3, 3], activation="tanh"),
            tf.keras.layers.AveragePooling2D(pool_size=(2, 2)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(16, activation="tanh"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    opt = tf.optimizers.Adam(0.001)
    mnist_model.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"]
    )

callbacks = [
    dtk.callbacks.BroadcastVariables(0),
    keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0, verbose=0),
]
if strategy.rank == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))
verbose = 2 if strategy.rank == 0 else 0

history = mnist_model.fit(
    dataset, steps_per_epoch=4, callbacks=callbacks, epochs=4, verbose=verbose
)

result = {"weights": mnist_model.get_weights(), "history": history.history}
