"""The step being traced: the weight of its losses, metrics and moving statistics."""
