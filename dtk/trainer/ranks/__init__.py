"""Agreement between ranks: on the batches they read, their weights and their seeds."""
