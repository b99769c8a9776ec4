"""Queries on users, quotas, sessions, tasks, usage and the tool log."""
