"""What is drawn: the transcript, and the lower part of the screen."""
