"""Build Horovod for the installed TensorFlow, and check that it reduces."""
