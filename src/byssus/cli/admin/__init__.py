"""The commands for a whole database."""
