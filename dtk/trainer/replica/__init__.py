"""One replica's step, and the trial of a few rows of it."""
