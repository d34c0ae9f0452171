"""The channel MLP for training: one operator that keeps little for its gradient."""
