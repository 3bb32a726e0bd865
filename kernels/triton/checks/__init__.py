"""The grid of cases that prove the kernels: in tests under the interpreter, on a GPU by gpu_check.

Inputs are fresh and random, outputs hold NaN before a launch, and so does every slot that must not
be read. A check returns an error to compare with a bound; NaN never passes.
"""
