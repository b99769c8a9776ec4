"""Runs as they are stored: lists, and what happened in one."""
