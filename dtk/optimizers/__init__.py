"""Optimizers for large batches, as ordinary Keras optimizers.

Importing this package registers them with Keras: import it before `keras.saving.load_model` reads a
model that was compiled with one.
"""

from dtk.optimizers.layerwise import LAMB, LARS
from dtk.optimizers.rmsprop_warmup import RMSpropWarmup

__all__ = ["LAMB", "LARS", "RMSpropWarmup"]
