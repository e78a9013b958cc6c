"""Jobs for workers behind parameter servers: train, push rarely, test, predict; and their parts."""
