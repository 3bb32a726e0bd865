"""Whole clients against a live server: agents, chains and conformance, not single calls."""
