"""Load for any server that speaks the common dialects: HTTP and WebSocket only, nothing of ours.

`python -m loadtest run --url http://127.0.0.1:8000 --workload agents --concurrency 1 4 8`
"""
