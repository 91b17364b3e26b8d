"""Nexmark: an auction house as a stream, queries over it, and their results by another engine."""
