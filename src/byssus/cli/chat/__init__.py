"""The commands in which a model answers."""
