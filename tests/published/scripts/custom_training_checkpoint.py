"""After TensorFlow's tutorial distribute/custom_training.ipynb, its checkpoints.

The chief saves: the tutorial's one process does, and TensorFlow has no lock for several that write
to one prefix. A model without a strategy is restored from the last one.
"""

import os

import dtk
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(43)

data = load_digits()
x, y = (data.data[:48] / 16).astype("float32"), data.target[:48].astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)


checkpoint_dir = os.path.abspath("training_checkpoints")
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")


def create_model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])


with strategy.scope():
    model = create_model()
    optimizer = keras.optimizers.SGD(0.1)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    test_loss = keras.metrics.Mean(name="test_loss")
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = tf.nn.compute_average_loss(loss_object(labels, predictions))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def test_step(inputs):
    images, labels = inputs
    test_loss.update_state(loss_object(labels, model(images, training=False)))


@tf.function
def distributed_train_step(dataset_inputs):
    strategy.run(train_step, args=(dataset_inputs,))


@tf.function
def distributed_test_step(dataset_inputs):
    strategy.run(test_step, args=(dataset_inputs,))


losses = []
for _epoch in range(2):
    for batch in strategy.experimental_distribute_dataset(dataset):
        distributed_train_step(batch)
    if strategy.is_chief:
        checkpoint.save(checkpoint_prefix)
    for batch in strategy.experimental_distribute_dataset(dataset):
        distributed_test_step(batch)
    losses.append(float(test_loss.result()))
    test_loss.reset_state()

new_model = create_model()
checkpoint = tf.train.Checkpoint(model=new_model)
checkpoint.restore(tf.train.latest_checkpoint(checkpoint_dir))

result = {
    "weights": model.get_weights(),
    "restored": new_model.get_weights(),
    "losses": losses,
}
