"""After TensorFlow's tutorial distribute/parameter_server_training.ipynb, its `ClusterCoordinator`.

Its custom loop schedules steps on workers. It needs parameter servers, so that there is no plain
process to compare with: what counts is that every scheduled step is applied, and that it learns.
"""

import random

import dtk
import keras
import tensorflow as tf

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(46)
random.seed(46)

VOCABULARY = 7


def dataset_fn(_):
    examples = [random.sample(range(VOCABULARY), 3) for _ in range(200)]
    labels = [[float(0 in features)] for features in examples]
    return tf.data.Dataset.from_tensor_slices((examples, labels)).shuffle(200).batch(32).repeat()


with strategy.scope():
    model_input = keras.layers.Input(shape=(3,), dtype="int64", name="model_input")
    emb_output = keras.ops.mean(keras.layers.Embedding(VOCABULARY, 16)(model_input), axis=1)
    model = keras.Model(model_input, keras.layers.Dense(1, activation="sigmoid")(emb_output))
    optimizer = keras.optimizers.RMSprop(learning_rate=0.1)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.BinaryAccuracy()


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = keras.losses.BinaryCrossentropy(reduction="none")(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

accuracies = []
for _epoch in range(4):
    accuracy.reset_state()
    for _ in range(5):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()
    accuracies.append(float(accuracy.result()))
loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
final_loss = float(loss.fetch())

result = {
    "accuracies": accuracies,
    "loss": final_loss,
    "steps": int(optimizer.iterations.numpy()),
}
