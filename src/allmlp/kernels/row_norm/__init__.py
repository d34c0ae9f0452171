"""LayerNorm in one pass."""
