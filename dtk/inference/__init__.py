"""Inference: what is done with a trained model, on all ranks or on one."""

from dtk.inference.artifacts import load, size_of
from dtk.inference.exporting import ExportError, export
from dtk.inference.latencies import Latency, latency
from dtk.inference.predict_to_disk import predict_to_disk
from dtk.inference.quantizing import Quantized, quantize
from dtk.inference.reading import Predictions, read
from dtk.inference.rows import Rows

__all__ = [
    "ExportError",
    "Latency",
    "Predictions",
    "Quantized",
    "Rows",
    "export",
    "latency",
    "load",
    "predict_to_disk",
    "quantize",
    "read",
    "size_of",
]
