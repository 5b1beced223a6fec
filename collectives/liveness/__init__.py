"""Failure detection: which ranks are alive, deadlines for waits, and every time limit."""
