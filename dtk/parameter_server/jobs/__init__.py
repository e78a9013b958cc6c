"""Jobs for workers behind parameter servers: train, train with rare pushes, test and predict."""
