"""SQLite behind the seam of `store/database.py`."""
