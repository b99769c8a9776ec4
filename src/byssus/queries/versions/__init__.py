"""Queries on checkpoints, forks, rewinds, deletions and erasures."""
