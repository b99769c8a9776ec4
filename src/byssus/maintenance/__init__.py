"""Backup and restore, copy, check and repair, export and import of whole threads and databases."""
