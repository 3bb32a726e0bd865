"""Pages and tokens, not tensors: a radix tree per namespace shares KV pages between requests.

Pure bookkeeping: no torch, no asyncio, no knowledge of models or wires. README.md states the
invariants; `cache.PrefixCache` is the face.
"""
