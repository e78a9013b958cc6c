"""`fit` against a training loop by hand, on the same strategy, data and kind of model.

The loop makes the reductions that `fit` makes, no fewer: gradients and moving statistics, by the
same optimizer; and in one more message the loss. That it does is checked by the bytes it sends.
"""

import sys

import keras
import tensorflow as tf
from dtk.bench.variant import Fit

import report
from fits import take, warm
from models import PROBLEMS

SPEED = report.at_least(0.98)
SUM = tf.distribute.ReduceOp.SUM


class Loop:
    """An epoch of a loop over a distributed dataset, which reads the loss of every step.

    Args:
        model: Compiled in the strategy's scope, for its optimizer and loss.
        dataset: Of global batches.
        strategy: The strategy.
    """

    name = "loop"

    def __init__(self, model, dataset, strategy):
        self._model, self._strategy = model, strategy
        distributed = strategy.experimental_distribute_dataset(dataset)
        self._batches = distributed.prefetch(tf.data.AUTOTUNE)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        self._step = tf.function(lambda x, y: strategy.run(self._replica_step, (x, y)))

    def _replica_step(self, x, y):
        model, size = self._model, self._strategy.size
        with tf.GradientTape() as tape:
            # Keras divides a mean by the number of replicas.
            loss = model.loss(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        with self._strategy.communicator.concurrent("loop"):
            replica = tf.distribute.get_replica_context()
            total, count = replica.all_reduce(SUM, [loss * size * rows, rows])
        return total / count

    def measure(self, tick):
        communicator, steps = self._strategy.communicator, 0
        before = communicator.bytes_sent
        for batch in self._batches:
            float(self._step(*batch))
            steps += 1
            tick()
        return {"sent": (communicator.bytes_sent - before) / steps}


def measure(setting, strategy):
    problem, communicator = PROBLEMS[setting.model], strategy.communicator
    batch = setting.batch_size * strategy.size
    rows = problem.data((setting.steps + 1) * batch)
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(batch)
    with strategy.scope():
        models = [problem.compiled(keras) for _ in range(2)]
    fit = Fit("fit", models[0], {"x": dataset, "shuffle": False}, setting.steps, communicator)
    variants = [fit, Loop(models[1], dataset, strategy)]
    sent = {name: said["sent"] for name, said in warm(variants).items()}
    # After 2, 4, 8, ... steps `fit` also compares what ranks have read: 8 bytes each time.
    if not 0 <= sent["fit"] - sent["loop"] <= 8:
        sys.exit(f"bytes sent per step: {sent}; the loop must reduce what fit reduces")
    seconds = take(variants, setting.rounds, communicator)
    cells = report.compared(seconds["fit"], seconds["loop"], SPEED, speed=True)
    header = "model|`fit`, ms per step|loop by hand, ms per step|loop / `fit`|target||sent per step"
    return report.markdown(header, [[setting.model, *cells, f"{sent['fit'] / 1e6:.3f} MB"]])
