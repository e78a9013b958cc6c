"""Private names of TensorFlow and Keras, each room's worth of them in one file."""
