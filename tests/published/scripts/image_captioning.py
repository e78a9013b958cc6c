"""After keras.io's examples/vision/image_captioning.py: a masked loss, once for each caption.

The loss is a sum over words divided by their number, so it is no mean over rows: a row counts with
its length. Encoder and decoder are small; there is no `call`.
"""

import dtk
import keras
import numpy as np
import tensorflow as tf
from keras import layers

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(25)

VOCABULARY, LENGTH, CAPTIONS = 20, 9, 2


class ImageCaptioningModel(keras.Model):
    def __init__(self, encoder, decoder, num_captions_per_image=CAPTIONS):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.acc_tracker = keras.metrics.Mean(name="accuracy")
        self.num_captions_per_image = num_captions_per_image

    def calculate_loss(self, y_true, y_pred, mask):
        loss = self.loss(y_true, y_pred)
        mask = tf.cast(mask, dtype=loss.dtype)
        loss *= mask
        return tf.reduce_sum(loss) / tf.reduce_sum(mask)

    def calculate_accuracy(self, y_true, y_pred, mask):
        accuracy = tf.equal(y_true, tf.argmax(y_pred, axis=2))
        accuracy = tf.cast(tf.math.logical_and(mask, accuracy), dtype=tf.float32)
        return tf.reduce_sum(accuracy) / tf.reduce_sum(tf.cast(mask, dtype=tf.float32))

    def train_step(self, batch_data):
        batch_img, batch_seq = batch_data
        batch_loss = 0
        batch_acc = 0
        for i in range(self.num_captions_per_image):
            with tf.GradientTape() as tape:
                encoder_out = self.encoder(batch_img, training=True)
                batch_seq_inp = batch_seq[:, i, :-1]
                batch_seq_true = batch_seq[:, i, 1:]
                mask = tf.math.not_equal(batch_seq_inp, 0)
                batch_seq_pred = self.decoder([batch_seq_inp, encoder_out], training=True)
                caption_loss = self.calculate_loss(batch_seq_true, batch_seq_pred, mask)
                caption_acc = self.calculate_accuracy(batch_seq_true, batch_seq_pred, mask)
                batch_loss += caption_loss
                batch_acc += caption_acc
            train_vars = self.encoder.trainable_variables + self.decoder.trainable_variables
            grads = tape.gradient(caption_loss, train_vars)
            self.optimizer.apply_gradients(zip(grads, train_vars, strict=True))
        self.loss_tracker.update_state(batch_loss)
        self.acc_tracker.update_state(batch_acc / float(self.num_captions_per_image))
        return {"loss": self.loss_tracker.result(), "acc": self.acc_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.acc_tracker]


rng = np.random.default_rng(25)
images = rng.random((50, 16)).astype("float32")
captions = rng.integers(1, VOCABULARY, (50, CAPTIONS, LENGTH))
captions[np.arange(LENGTH) >= rng.integers(2, LENGTH, (50, CAPTIONS, 1))] = 0
train_dataset = tf.data.Dataset.from_tensor_slices((images, captions)).batch(16)

with strategy.scope():
    encoder = keras.Sequential([keras.Input((16,)), layers.Dense(8, activation="tanh")])
    words = keras.Input((LENGTH - 1,), dtype="int64")
    image = keras.Input((8,))
    h = layers.Embedding(VOCABULARY, 8)(words) + layers.Reshape((1, 8))(image)
    decoder = keras.Model([words, image], layers.Dense(VOCABULARY)(keras.ops.tanh(h)))
    caption_model = ImageCaptioningModel(encoder, decoder)
    caption_model.compile(
        optimizer=keras.optimizers.Adam(0.0001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
    )

history = caption_model.fit(train_dataset, epochs=2, verbose=2)

result = {"weights": caption_model.get_weights(), "history": history.history}
