"""Finding out what is fast, and what is good."""
