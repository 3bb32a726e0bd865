"""The live page at `/dashboard`, and what feeds it."""
