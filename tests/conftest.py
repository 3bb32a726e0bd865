"""Triton kernels run in Triton's interpreter in all tests, on CPU tensors. Triton decides that for
each of its functions when it is imported, so the switch is set before anything can import it."""

import os

os.environ["TRITON_INTERPRET"] = "1"
