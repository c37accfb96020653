"""Moves bytes between aligned memory and files: one protocol, NIXL's POSIX backend and plain threads behind it.

Knows nothing of blocks, keys or vLLM; whoever stores blocks decides what the bytes mean and checks them.
"""
