"""gMLP's channel MLP with its spatial gate for training: one operator that keeps little for its gradient."""
