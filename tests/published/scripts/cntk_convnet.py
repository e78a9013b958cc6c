"""After CNTK's ConvNet_CIFAR10_DataAug_Distributed.py, a data-parallel session, as a Keras script.

StateVariable: rates per sample and momentum as a time constant, both by epoch, L2 on all weights, a
checkpoint after each epoch, and an error over test minibatches of 16. Left out: random crops and
dropout.
"""

import dtk
import keras
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(35)

epoch_size, minibatch_size, max_epochs = 49, 16, 3
lr_per_sample = [(1, 0.003), (2, 0.001)]
mm_time_constant = 200

data = load_digits()
images = data.images[:70, ..., None].astype("float32") * 16
labels = keras.utils.to_categorical(data.target[:70], 10)


def dense(units, activation=None):
    return layers.Dense(units, activation, kernel_regularizer=keras.regularizers.L2(0.002))


with strategy.scope():
    z = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(0.00390625),
            layers.Conv2D(4, 3, padding="same", activation="tanh"),
            layers.Conv2D(4, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(3, 2),
            layers.Flatten(),
            dense(16, "tanh"),
            dense(8, "tanh"),
            dense(10),
        ]
    )
    z.compile(
        keras.optimizers.SGD(
            dtk.schedules.by_samples(
                [(epochs, rate * minibatch_size) for epochs, rate in lr_per_sample],
                minibatch_size,
                epoch_size=epoch_size,
            ),
            momentum=dtk.schedules.momentum_from_time_constant(mm_time_constant, minibatch_size),
        ),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = z.fit(
    images[:epoch_size],
    labels[:epoch_size],
    batch_size=minibatch_size,
    epochs=max_epochs,
    callbacks=[keras.callbacks.ModelCheckpoint("ConvNet_{epoch}.keras")],
    verbose=2,
)
loss, accuracy = z.evaluate(images[epoch_size:], labels[epoch_size:], batch_size=16, verbose=0)

result = {"weights": z.get_weights(), "history": history.history, "errs": 1 - accuracy}
