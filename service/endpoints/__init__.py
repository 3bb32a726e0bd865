"""Paths of the server, a file each: read a request, let it run, answer in its dialect."""
