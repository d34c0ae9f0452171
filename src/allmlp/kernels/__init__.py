"""Fused operations: each folder has the definition in plain PyTorch (reference.py) and the fast path (triton.py)."""
