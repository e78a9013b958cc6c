"""What ranks must agree on: what they read, their weights and their seeds."""
