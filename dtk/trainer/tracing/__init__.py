"""The step being traced: what its losses, metrics and moving statistics count."""
