"""Model parallelism: layers of which every rank of a group computes a part, exactly."""
