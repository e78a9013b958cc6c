"""Parts of `dtk.callbacks.Checkpoint`: files, what they hold, reading, writing, SIGTERM."""
