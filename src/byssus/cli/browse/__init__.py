"""The commands that show what is stored, and that change a thread."""
