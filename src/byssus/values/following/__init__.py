"""The items of a thread that is followed, their JSON form, and cursors."""
