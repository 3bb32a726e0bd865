"""Tensors in, tensors out: the backends that step a decoder over paged KV, behind one contract.

This package knows nothing of requests, prefixes or wires. `contract` says what a backend does,
`registry` picks one.
"""

# `transformers` looks for a PyPI distribution named "kernels" and uses it from 0.18.2 on. This
# package is not that one and installs no distribution of that name; the version stays below, so
# that a lookup by module attribute turns away as well.
__version__ = "0.1.0"
