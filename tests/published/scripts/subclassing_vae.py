"""After keras.io's guides/making_new_layers_and_models_via_subclassing.py, its end-to-end VAE.

The KL divergence is a `reduce_mean` given to `add_loss`, beside a compiled loss object. Epsilon is
a function of the row instead of random.
"""

import dtk
import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(8)


class Sampling(layers.Layer):
    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = tf.stop_gradient(2.0 * tf.sin(20.0 * z_mean + 1.0))
        return z_mean + tf.exp(0.5 * z_log_var) * epsilon


class Encoder(layers.Layer):
    def __init__(self, latent_dim=4, intermediate_dim=16, name="encoder", **kwargs):
        super().__init__(name=name, **kwargs)
        self.dense_proj = layers.Dense(intermediate_dim, activation="tanh")
        self.dense_mean = layers.Dense(latent_dim)
        self.dense_log_var = layers.Dense(latent_dim)
        self.sampling = Sampling()

    def call(self, inputs):
        x = self.dense_proj(inputs)
        z_mean = self.dense_mean(x)
        z_log_var = self.dense_log_var(x)
        return z_mean, z_log_var, self.sampling((z_mean, z_log_var))


class Decoder(layers.Layer):
    def __init__(self, original_dim, intermediate_dim=16, name="decoder", **kwargs):
        super().__init__(name=name, **kwargs)
        self.dense_proj = layers.Dense(intermediate_dim, activation="tanh")
        self.dense_output = layers.Dense(original_dim, activation="sigmoid")

    def call(self, inputs):
        return self.dense_output(self.dense_proj(inputs))


class VariationalAutoEncoder(keras.Model):
    def __init__(self, original_dim, name="autoencoder", **kwargs):
        super().__init__(name=name, **kwargs)
        self.encoder = Encoder()
        self.decoder = Decoder(original_dim)

    def call(self, inputs):
        z_mean, z_log_var, z = self.encoder(inputs)
        reconstructed = self.decoder(z)
        kl_loss = -0.5 * tf.reduce_mean(z_log_var - tf.square(z_mean) - tf.exp(z_log_var) + 1)
        self.add_loss(kl_loss)
        return reconstructed


x_train = (load_digits().data[:49] / 16).astype("float32")

with strategy.scope():
    vae = VariationalAutoEncoder(64)
    vae.compile(keras.optimizers.Adam(1e-3), loss=keras.losses.MeanSquaredError())

history = vae.fit(x_train, x_train, epochs=3, batch_size=16, verbose=2)

result = {
    "weights": vae.get_weights(),
    "history": history.history,
    "test": vae.evaluate(x_train, x_train, batch_size=16, verbose=0),
}
