"""Lend this process's spare memory, and take it back at any moment."""
