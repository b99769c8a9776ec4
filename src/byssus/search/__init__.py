"""Search: words of a text, the index, and the operation that asks it."""
