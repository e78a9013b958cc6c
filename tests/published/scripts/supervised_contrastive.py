"""After keras.io's examples/vision/supervised-contrastive-learning.py: every row meets every other.

The loss object overrides `__call__`, and its value is neither a mean nor a sum over rows: half a
batch has other negatives. Written without TensorFlow Addons, whose npairs_loss it uses.
"""

import dtk
import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(22)


def npairs_loss(labels, logits):
    same = tf.cast(labels[:, None] == labels[None, :], logits.dtype)
    targets = same / tf.reduce_sum(same, axis=1, keepdims=True)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(targets, logits))


class SupervisedContrastiveLoss(keras.losses.Loss):
    def __init__(self, temperature=1, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels, feature_vectors, sample_weight=None):
        normalized = tf.math.l2_normalize(feature_vectors, axis=1)
        logits = tf.matmul(normalized, normalized, transpose_b=True) / self.temperature
        return npairs_loss(tf.reshape(labels, [-1]), logits)


data = load_digits()
x_train = (data.images[:50, ..., None] / 16).astype("float32")
y_train = data.target[:50, None].astype("int64")

with strategy.scope():
    inputs = keras.Input((8, 8, 1))
    features = layers.Dense(16, activation="tanh")(layers.Flatten()(inputs))
    outputs = layers.Dense(8, activation="tanh")(features)
    encoder_with_projection_head = keras.Model(inputs, outputs)
    encoder_with_projection_head.compile(
        optimizer=keras.optimizers.Adam(1e-3), loss=SupervisedContrastiveLoss(0.5)
    )

history = encoder_with_projection_head.fit(x=x_train, y=y_train, batch_size=16, epochs=2, verbose=2)

result = {
    "weights": encoder_with_projection_head.get_weights(),
    "history": history.history,
}
