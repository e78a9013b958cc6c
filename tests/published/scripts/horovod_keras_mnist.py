"""After Horovod's examples/keras/keras_mnist.py, moved to dtk; its habits stay where they can.

`epochs` and the rate are not scaled here, so that one process can be compared; pooling is by
average, and there is no dropout.
"""

import dtk
import keras
from keras.layers import AveragePooling2D, Conv2D, Dense, Flatten
from keras.models import Sequential
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(31)

batch_size = 16
num_classes = 10
epochs = 2

digits = load_digits()
x_train, x_test = digits.images[:50], digits.images[50:70]
y_train, y_test = digits.target[:50], digits.target[50:70]
x_train = x_train.reshape(x_train.shape[0], 8, 8, 1).astype("float32") / 16
x_test = x_test.reshape(x_test.shape[0], 8, 8, 1).astype("float32") / 16
y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

with strategy.scope():
    model = Sequential()
    model.add(keras.Input((8, 8, 1)))
    model.add(Conv2D(4, kernel_size=(3, 3), activation="tanh"))
    model.add(AveragePooling2D(pool_size=(2, 2)))
    model.add(Flatten())
    model.add(Dense(16, activation="tanh"))
    model.add(Dense(num_classes, activation="softmax"))

    opt = keras.optimizers.Adadelta(1.0)
    model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])

callbacks = [dtk.callbacks.BroadcastVariables(0)]
if strategy.rank == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

history = model.fit(
    x_train,
    y_train,
    batch_size=batch_size,
    callbacks=callbacks,
    epochs=epochs,
    verbose=2 if strategy.rank == 0 else 0,
    validation_data=(x_test, y_test),
)
score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])

result = {"weights": model.get_weights(), "history": history.history, "test": score}
