"""One replica's step, and its trial on a few rows."""
