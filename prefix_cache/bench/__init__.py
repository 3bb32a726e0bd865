"""Measurements of the prefix cache alone: `python -m prefix_cache.bench --help`."""
