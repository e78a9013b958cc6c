"""Private names of TensorFlow and Keras, each room's worth of them in one file.

Whatever is imported from here, that all of them are there is looked up first: what lacks one is
named in one line, before anything trains.
"""

from dtk.compat import names

names.check()
