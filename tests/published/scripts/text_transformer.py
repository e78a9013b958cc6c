"""After keras.io's examples/nlp/text_classification_with_transformer.py; without dropout."""

import dtk
import keras
import numpy as np
from keras import layers, ops

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(14)

VOCABULARY, MAXLEN, WIDTH, HEADS = 50, 12, 8, 2


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="gelu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        attn_output = self.att(inputs, inputs)
        out1 = self.layernorm1(inputs + attn_output)
        ffn_output = self.ffn(out1)
        return self.layernorm2(out1 + ffn_output)


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        maxlen = ops.shape(x)[-1]
        positions = ops.arange(start=0, stop=maxlen, step=1)
        return self.token_emb(x) + self.pos_emb(positions)


rng = np.random.default_rng(14)
sequences = [rng.integers(1, VOCABULARY, rng.integers(4, 20)) for _ in range(70)]
x = keras.utils.pad_sequences(sequences, maxlen=MAXLEN)
y = (x.max(1) > VOCABULARY - 4).astype("int64")
x_train, y_train, x_val, y_val = x[:50], y[:50], x[50:], y[50:]

with strategy.scope():
    inputs = layers.Input(shape=(MAXLEN,))
    h = TokenAndPositionEmbedding(MAXLEN, VOCABULARY, WIDTH)(inputs)
    h = TransformerBlock(WIDTH, HEADS, 16)(h)
    h = layers.GlobalAveragePooling1D()(h)
    h = layers.Dense(8, activation="tanh")(h)
    outputs = layers.Dense(2, activation="softmax")(h)
    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(
        optimizer="adam",
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

history = model.fit(
    x_train, y_train, batch_size=16, epochs=2, validation_data=(x_val, y_val), verbose=2
)

# A bias of keys changes no attention: its gradient is rounding, which Adam divides by itself.
weights = [w.numpy() for w in model.weights if not w.path.endswith("key/bias")]
result = {"weights": weights, "history": history.history}
