"""Parameter servers: scheduling, workers, gradients, and the trainer on the chief."""
