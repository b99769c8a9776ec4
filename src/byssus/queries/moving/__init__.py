"""Queries that copy, export, import and check whole tables."""
