"""What reaches a run from outside: answers to its questions, a hand-over, and the process that takes it over."""
