"""Following a thread: the operations, the hub that wakes followers, and how rows become items."""
