"""Inference: what is done with a trained model, on all ranks or on one."""

from dtk.inference.artifacts import ExportError, Latency, export, latency, load, size_of
from dtk.inference.exporters import BestExporter, LatestExporter
from dtk.inference.part_files import Predictions, Rows, read
from dtk.inference.predict_to_disk import predict_to_disk
from dtk.inference.weights import Quantized, quantize

__all__ = [
    "BestExporter",
    "ExportError",
    "Latency",
    "LatestExporter",
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
