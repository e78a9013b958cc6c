"""What is sent, and when."""

from dtk.exchange.downpour import Downpour

__all__ = ["Downpour"]
