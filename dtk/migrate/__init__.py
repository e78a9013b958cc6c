"""Other libraries' names over dtk, for scripts that change only their import.

`dtk.migrate.horovod` has Horovod's, `dtk.migrate.tf_distribute` those of `tf.distribute`. `dtk
migrate SCRIPT` writes a script in dtk's own names (`dtk.migrate.script`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtk.migrate import horovod, tf_distribute

__all__ = ["horovod", "tf_distribute"]


def __getattr__(name: str) -> object:
    if name in __all__:  # `dtk migrate` needs no TensorFlow
        return importlib.import_module(f"dtk.migrate.{name}")
    raise AttributeError(f"module 'dtk.migrate' has no attribute {name!r}")
