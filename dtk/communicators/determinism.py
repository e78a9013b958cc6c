"""Whether TensorFlow was asked for the same bits in every run.

If so, no measurement may decide in which order numbers are added up.
"""

from __future__ import annotations

import tensorflow as tf

from dtk import placement


def is_asked_for() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism` was called.

    TensorFlow has no public function for this, but `tf.timestamp` raises once it was called.
    """
    with tf.init_scope(), tf.device(placement.host()):
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return True
    return False
