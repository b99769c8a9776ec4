"""Tools for the plain agents of the command line."""
