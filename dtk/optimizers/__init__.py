"""Optimizers for large batches, as ordinary Keras optimizers, one per file.

Importing this package registers them with Keras: import it before `keras.saving.load_model` reads a
model that was compiled with one.
"""

from dtk.optimizers.lamb import LAMB
from dtk.optimizers.lars import LARS
from dtk.optimizers.rmsprop_warmup import RMSpropWarmup

__all__ = ["LAMB", "LARS", "RMSpropWarmup"]
