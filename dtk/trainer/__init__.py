"""A Keras model trained over the replicas of a strategy."""
