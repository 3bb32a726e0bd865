"""Measures what Headwater promises under load, on a quiet machine: `python -m` this package."""
