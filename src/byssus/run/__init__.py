"""Runs: from a prompt to the end of an agent's work, recorded in a journal as it happens."""
