"""What followers of threads read."""
