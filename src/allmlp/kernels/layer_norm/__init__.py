"""LayerNorm in one pass, its statistics alone, its transposed output, or the mean of its tokens."""
