"""The GPU backend: one Triton kernel per op and file, composed in Python.

Every op is a kernel and one function that checks its arguments and launches it. Under Triton's
interpreter (TRITON_INTERPRET=1, read by Triton when this package is imported) the same kernels run
on CPU tensors. README.md of `kernels` says what was shown to work, and how.
"""
