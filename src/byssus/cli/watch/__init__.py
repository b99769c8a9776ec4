"""`byssus watch`: what the live runs of a database do, on one screen."""
