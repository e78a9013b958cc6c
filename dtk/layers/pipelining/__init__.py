"""Parts of a pipeline: stages, messages between them, and orders of microbatches."""
