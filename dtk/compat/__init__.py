"""Everything that touches private names of TensorFlow and Keras, one file per subject.

Importing anything from here first checks that every name of `names.NEEDED` exists; a missing one is
named in one line, before anything trains.
"""

from dtk.compat import names

names.check()
