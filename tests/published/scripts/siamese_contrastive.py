"""After keras.io's examples/vision/siamese_contrastive.py: a loss function that returns a scalar.

Normalisation is by layer: that by batch would need `synchronized=True` to be compared.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(4)


def euclidean_distance(vects):
    x, y = vects
    sum_square = tf.math.reduce_sum(tf.math.square(x - y), axis=1, keepdims=True)
    return tf.math.sqrt(tf.math.maximum(sum_square, keras.backend.epsilon()))


def loss(margin=1):
    def contrastive_loss(y_true, y_pred):
        square_pred = tf.math.square(y_pred)
        margin_square = tf.math.square(tf.math.maximum(margin - y_pred, 0))
        return tf.math.reduce_mean((1 - y_true) * square_pred + y_true * margin_square)

    return contrastive_loss


data = load_digits()
images = (data.images[:140, ..., None] / 16).astype("float32")
left, right = images[:70], images[70:]
labels = (data.target[:70] == data.target[70:140]).astype("float32")

with strategy.scope():
    tower_input = layers.Input((8, 8, 1))
    x = layers.Conv2D(4, (3, 3), activation="tanh")(tower_input)
    x = layers.AveragePooling2D(pool_size=(2, 2))(x)
    x = layers.Flatten()(x)
    x = layers.LayerNormalization()(x)
    x = layers.Dense(10, activation="tanh")(x)
    embedding_network = keras.Model(tower_input, x)

    input_1 = layers.Input((8, 8, 1))
    input_2 = layers.Input((8, 8, 1))
    tower_1 = embedding_network(input_1)
    tower_2 = embedding_network(input_2)
    merge_layer = layers.Lambda(euclidean_distance, output_shape=(1,))([tower_1, tower_2])
    output_layer = layers.Dense(1, activation="sigmoid")(merge_layer)
    siamese = keras.Model(inputs=[input_1, input_2], outputs=output_layer)
    siamese.compile(
        loss=loss(margin=1),
        optimizer="RMSprop",
        metrics=["accuracy"],
    )

history = siamese.fit(
    [left[:50], right[:50]],
    labels[:50],
    validation_data=([left[50:], right[50:]], labels[50:]),
    batch_size=16,
    epochs=3,
    verbose=2,
)
results = siamese.evaluate([left[50:], right[50:]], labels[50:], verbose=0)
predictions = siamese.predict([left[50:], right[50:]], verbose=0)

result = {
    "weights": siamese.get_weights(),
    "history": history.history,
    "test": np.array(results),
    "predictions": predictions,
}
