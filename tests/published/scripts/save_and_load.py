"""After TensorFlow's tutorial distribute/save_and_load.ipynb; every rank saves to one path.

As in the tutorial the model is loaded outside the scope, inside it, and as a SavedModel; and, as
its section on inference does with a signature, an uncompiled model predicts.
"""

import os

import dtk
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(41)


def get_data():
    data = load_digits()
    x, y = (data.images[:70, ..., None] / 16).astype("float32"), data.target[:70].astype("int64")
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.take(50).cache().batch(16), dataset.skip(50).batch(16)


def get_model():
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.InputLayer(shape=(8, 8, 1)),
                tf.keras.layers.Conv2D(4, 3, activation="tanh"),
                tf.keras.layers.AveragePooling2D(2),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(16, activation="tanh"),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.Adam(),
            metrics=[tf.metrics.SparseCategoricalAccuracy()],
        )
        return model


model = get_model()
train_dataset, eval_dataset = get_data()
model.fit(train_dataset, epochs=1, verbose=0)

keras_model_path = os.path.abspath("keras_save.keras")
model.save(keras_model_path)

# without a strategy: every rank would train this one by itself, so here it only predicts
restored_keras_model = tf.keras.models.load_model(keras_model_path)
restored = restored_keras_model.predict(eval_dataset.map(lambda image, label: image), verbose=0)

# with one
with strategy.scope():
    restored_keras_model_ds = tf.keras.models.load_model(keras_model_path)
    history = restored_keras_model_ds.fit(train_dataset, epochs=1, verbose=0)

# The lower-level API: a SavedModel is a folder.
saved_model_path = os.path.abspath("tf_save")
model.export(saved_model_path, verbose=False)
loaded = tf.saved_model.load(saved_model_path)
inference_func = loaded.signatures["serving_default"]
predict_dataset = eval_dataset.map(lambda image, label: image)
signature = [next(iter(inference_func(batch).values())).numpy() for batch in predict_dataset]

# A model that only predicts
with strategy.scope():
    predictor = tf.keras.models.load_model(keras_model_path, compile=False)
predicted = predictor.predict(predict_dataset, verbose=0)

result = {
    "weights": model.get_weights(),
    "without": restored,
    "with": restored_keras_model_ds.get_weights(),
    "steps": int(restored_keras_model_ds.optimizer.iterations),
    "history": history.history,
    "signature": np.concatenate(signature),
    "predicted": predicted,
}
