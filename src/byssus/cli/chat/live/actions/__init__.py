"""What the commands of the chat do: one function for each, in a file for each group."""
