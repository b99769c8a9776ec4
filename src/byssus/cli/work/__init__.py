"""The commands about tasks and workers."""
