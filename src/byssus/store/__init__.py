"""Runs queries: `database.py` is the seam, a folder is a database behind it, `operations.py` serves both surfaces."""
