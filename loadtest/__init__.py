"""Load for any OpenAI-compatible server: talks HTTP only and imports nothing of ours.

`python -m loadtest --url http://127.0.0.1:8000 --concurrency 1 4 8`
"""
