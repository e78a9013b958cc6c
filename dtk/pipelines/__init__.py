"""Pipelines of tf.data as operations: a rank maps only the rows that it keeps."""
