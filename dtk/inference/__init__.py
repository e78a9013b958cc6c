"""Inference: what is done with a trained model, on all ranks or on one."""

from dtk.inference.predict_to_disk import predict_to_disk
from dtk.inference.reading import Predictions, Rows, read

__all__ = [
    "Predictions",
    "Rows",
    "predict_to_disk",
    "read",
]
