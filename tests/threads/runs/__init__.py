"""Tests of byssus.threads.runs."""
