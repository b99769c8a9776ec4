"""Queries on tasks: their rows, the moves between their states, and the workers' claims."""
