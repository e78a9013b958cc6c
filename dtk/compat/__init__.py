"""All uses of private names of TensorFlow and Keras, one file per subject.

Importing from here first checks that every name in `names.NEEDED` exists; if one is missing, a
one-line error names it before anything trains.
"""

from dtk.compat import names

names.check()
