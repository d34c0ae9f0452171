"""gMLP's channel MLP with its spatial gating unit for training: one op that saves little for its gradient."""
