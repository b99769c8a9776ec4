"""Queries on the search index."""
