"""LayerNorm in one pass, its statistics alone, or its transposed output."""
