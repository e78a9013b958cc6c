"""The names of `tf.distribute.experimental`."""

from __future__ import annotations

import tensorflow as tf

from dtk.migrate.replaced_names import kept
from dtk.migrate.tf_distribute import MultiWorkerMirroredStrategy, ParameterServerStrategy

__all__ = ["MultiWorkerMirroredStrategy", "ParameterServerStrategy"]


def __getattr__(name: str) -> object:
    return kept(name, tf.distribute.experimental, "experimental.")
