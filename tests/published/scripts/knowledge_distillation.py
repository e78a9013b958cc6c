"""After keras.io's examples/vision/knowledge_distillation.py: two loss objects, weighed and logged.

`train_step` returns metrics and, beside them, the losses of the last batch.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(28)


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3
    ):
        super().compile(optimizer=optimizer)
        self.student_metrics = metrics
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def train_step(self, data):
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            student_predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, student_predictions)
            distillation_loss = self.distillation_loss_fn(
                tf.nn.softmax(teacher_predictions / self.temperature, axis=1),
                tf.nn.softmax(student_predictions / self.temperature, axis=1),
            )
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        trainable_vars = self.student.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars, strict=True))
        for metric in self.student_metrics:
            metric.update_state(y, student_predictions)
        results = {m.name: m.result() for m in self.student_metrics}
        results.update({"student_loss": student_loss, "distillation_loss": distillation_loss})
        return results

    def test_step(self, data):
        x, y = data
        y_prediction = self.student(x, training=False)
        student_loss = self.student_loss_fn(y, y_prediction)
        for metric in self.student_metrics:
            metric.update_state(y, y_prediction)
        results = {m.name: m.result() for m in self.student_metrics}
        results.update({"student_loss": student_loss})
        return results


data = load_digits()
x, y = (data.data[:49] / 16).astype("float32"), data.target[:49].astype("int64")


def network(units, name):
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(units, activation="tanh"),
            keras.layers.Dense(10),
        ],
        name=name,
    )


with strategy.scope():
    teacher, student = network(16, "teacher"), network(4, "student")
    distiller = Distiller(student=student, teacher=teacher)
    distiller.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=1,
    )

history = distiller.fit(x, y, epochs=2, batch_size=16, verbose=2)
evaluated = distiller.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)

result = {
    "weights": distiller.get_weights(),
    "history": history.history,
    "test": {name: np.array(value) for name, value in evaluated.items()},
}
