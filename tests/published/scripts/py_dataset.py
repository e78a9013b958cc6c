"""After keras.io's guides/training_with_built_in_methods.py, its `PyDataset`."""

import math

import dtk
import keras
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(21)


class ExamplePyDataset(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.x[rows], self.y[rows]


data = load_digits()
x, y = (data.data[:70] / 16).astype("float32"), data.target[:70].astype("int64")
train_py_dataset = ExamplePyDataset(x[:49], y[:49], batch_size=16)
val_py_dataset = ExamplePyDataset(x[49:], y[49:], batch_size=16)

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(10)]
    )
    model.compile(
        keras.optimizers.RMSprop(learning_rate=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(train_py_dataset, validation_data=val_py_dataset, epochs=3, verbose=2)

result = {
    "weights": model.get_weights(),
    "history": history.history,
    "predictions": model.predict(val_py_dataset, verbose=0),
}
