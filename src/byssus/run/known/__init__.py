"""What an agent knows of its thread: the end of it that it holds, and what a program can read."""
