"""Ways to run dtk's ranks in the processes of other engines."""
