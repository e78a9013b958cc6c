"""After TensorFlow's tutorial distribute/parameter_server_training.ipynb, its model, by `fit`.

Strings are looked up in a `map` before the batches, an embedding is averaged, and RMSprop trains.
"""

import random

import dtk
import keras
import numpy as np
import tensorflow as tf

strategy = dtk.auto_strategy()
keras.utils.set_random_seed(45)
random.seed(45)

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]

with strategy.scope():
    feature_lookup_layer = keras.layers.StringLookup(vocabulary=feature_vocab, mask_token=None)
    label_lookup_layer = keras.layers.StringLookup(
        vocabulary=label_vocab, num_oov_indices=0, mask_token=None
    )
    raw_feature_input = keras.layers.Input(shape=(3,), dtype="string", name="feature")
    feature_preprocess_stage = keras.Model(
        {"features": raw_feature_input}, feature_lookup_layer(raw_feature_input)
    )


def feature_and_label_gen(num_examples=49):
    examples = {"features": [], "label": []}
    for _ in range(num_examples):
        features = random.sample(feature_vocab, 3)
        examples["features"].append(features)
        examples["label"].append(["yes"] if "avenger" in features else ["no"])
    return examples


train_dataset = tf.data.Dataset.from_tensor_slices(feature_and_label_gen()).map(
    lambda x: (
        {"features": feature_preprocess_stage({"features": x["features"][None]})[0]},
        label_lookup_layer(x["label"]),
    )
)
train_dataset = train_dataset.shuffle(200).batch(16)

with strategy.scope():
    model_input = keras.layers.Input(shape=(3,), dtype="int64", name="features")
    emb_output = keras.ops.mean(
        keras.layers.Embedding(feature_lookup_layer.vocabulary_size(), 16)(model_input), axis=1
    )
    dense_output = keras.layers.Dense(
        1, activation="sigmoid", kernel_regularizer=keras.regularizers.L2(1e-4)
    )(emb_output)
    model = keras.Model({"features": model_input}, dense_output)
    model.compile(
        keras.optimizers.RMSprop(learning_rate=0.1),
        "binary_crossentropy",
        metrics=["accuracy"],
    )

history = model.fit(train_dataset, epochs=3, verbose=2)

eval_dataset = train_dataset.take(2)
result = {
    "weights": model.get_weights(),
    "history": history.history,
    "rows": np.array([len(labels) for _, labels in eval_dataset]),
}
