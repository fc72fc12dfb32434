"""A loop of unknown length, the least that Triton's interpreter must be able to do: run by test_interpreted.py."""

import triton


@triton.jit
def count(n):
    for _ in range(n):
        pass


count[(1,)](2)
