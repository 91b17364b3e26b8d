"""Made by move.py."""
