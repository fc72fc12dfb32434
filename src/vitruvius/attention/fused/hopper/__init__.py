"""Kernels that only Hopper GPUs run, written in Gluon: robust and masked attention of short heads in bf16.

`_dispatch.py` says who gets them; nothing here imports Triton before it is asked to.
"""
