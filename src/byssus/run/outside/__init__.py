"""What reaches a run from outside: its request, answers to its questions, a hand-over, and who takes it over."""
