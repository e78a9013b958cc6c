"""Delayed block proximal gradient on parameter servers."""
