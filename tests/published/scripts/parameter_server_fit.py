"""After TensorFlow's tutorial distribute/parameter_server_training.ipynb, its `Model.fit`."""

import os

import dtk
import keras
import tensorflow as tf

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(44)

global_batch_size = 16

x = tf.random.uniform((10, 10))
y = tf.random.uniform((10, 1))
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat()
dataset = dataset.batch(global_batch_size)
dataset = dataset.prefetch(2)

with strategy.scope():
    model = keras.models.Sequential([keras.Input((10,)), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.1), loss="mse", steps_per_execution=5)

working_dir = os.path.abspath("my_working_dir")
callbacks = [
    keras.callbacks.TensorBoard(log_dir=os.path.join(working_dir, "log")),
    keras.callbacks.ModelCheckpoint(filepath=os.path.join(working_dir, "ckpt.keras")),
    keras.callbacks.BackupAndRestore(backup_dir=os.path.join(working_dir, "backup")),
]

history = model.fit(dataset, epochs=2, steps_per_epoch=10, callbacks=callbacks, verbose=2)

result = {"weights": model.get_weights(), "history": history.history}
