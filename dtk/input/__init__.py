"""Input: batches cut by rank, pipelines that end in time, digests of the batches read."""
