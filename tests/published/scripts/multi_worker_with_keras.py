"""After TensorFlow's tutorial distribute/multi_worker_with_keras.ipynb.

Every worker saves, the chief to the wanted path and the others to folders that they then remove;
`strategy.cluster_resolver` says who is who. Unlike the tutorial, a worker loads what it has saved
itself, since nothing there waits for the chief's file; and each `fit` has a dataset of its own: how
far the last one has read ahead decides how an endless one is shuffled next.
"""

import os

import dtk
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(37)


def mnist_dataset(batch_size):
    data = load_digits()
    x_train = (data.images[:50] / 16).astype("float32")
    y_train = data.target[:50].astype("int64")
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    return dataset.shuffle(50, seed=37).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(8, 8)),
            tf.keras.layers.Reshape(target_shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(4, 3, activation="tanh"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(16, activation="tanh"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


per_worker_batch_size = 16 // strategy.num_replicas_in_sync
global_batch_size = per_worker_batch_size * strategy.num_replicas_in_sync

with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()

history = multi_worker_model.fit(
    mnist_dataset(global_batch_size), epochs=2, steps_per_epoch=3, verbose=2
)

# Model saving and loading

model_path = os.path.abspath("keras-model/model.keras")


def _is_chief(task_type, task_id):
    return (task_type == "worker" and task_id == 0) or task_type in (None, "chief")


def write_filepath(filepath, task_type, task_id):
    dirpath, base = os.path.split(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = os.path.join(dirpath, "workertemp_" + str(task_id))
    tf.io.gfile.makedirs(dirpath)
    return os.path.join(dirpath, base)


# outside dtk TensorFlow's own strategy has no resolver: the tutorial's case of a single worker
resolver = strategy.cluster_resolver
task_type, task_id = (resolver.task_type, resolver.task_id) if resolver else (None, None)
# not in the tutorial: two that take themselves for the chief write to one path, mostly unharmed
assert _is_chief(task_type, task_id) == strategy.is_chief, (task_type, task_id)
write_model_path = write_filepath(model_path, task_type, task_id)
multi_worker_model.save(write_model_path)

# in the scope: without it every rank would train a model of its own, which dtk refuses
with strategy.scope():
    loaded_model = tf.keras.models.load_model(write_model_path)
loaded_model.fit(mnist_dataset(16), epochs=1, steps_per_epoch=3, verbose=0)
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))

# Checkpoint saving and restoring

write_checkpoint_dir = os.path.dirname(
    write_filepath(os.path.abspath("ckpt/of"), task_type, task_id)
)
checkpoint = tf.train.Checkpoint(model=multi_worker_model)
checkpoint_manager = tf.train.CheckpointManager(
    checkpoint, directory=write_checkpoint_dir, max_to_keep=1
)
checkpoint_manager.save()
before = multi_worker_model.get_weights()
multi_worker_model.set_weights([weight + 1 for weight in before])
checkpoint.restore(tf.train.latest_checkpoint(write_checkpoint_dir))
restored = multi_worker_model.get_weights()
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(write_checkpoint_dir)
multi_worker_model.fit(mnist_dataset(global_batch_size), epochs=1, steps_per_epoch=2, verbose=0)

# Callbacks

callbacks = [
    tf.keras.callbacks.BackupAndRestore(backup_dir="backup"),
    tf.keras.callbacks.ModelCheckpoint("last.keras"),
]
keras.utils.set_random_seed(39)
with strategy.scope():
    another_model = build_and_compile_cnn_model()
history_with_callbacks = another_model.fit(
    mnist_dataset(global_batch_size),
    epochs=2,
    steps_per_epoch=3,
    callbacks=callbacks,
    verbose=2,
)

result = {
    "history": history.history,
    "loaded": loaded_model.get_weights(),
    "restored": restored,
    "weights": multi_worker_model.get_weights(),
    "with callbacks": history_with_callbacks.history,
    "trained with callbacks": another_model.get_weights(),
}
