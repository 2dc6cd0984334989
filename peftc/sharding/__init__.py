"""Edits of modules whose weights tensor parallelism has split."""
