"""Helpers of callbacks to read and change learning rate, momentum, batch size and epochs."""
