"""Gradients from a replica's tape through the exchange to the optimizer."""
