"""The channel MLP for training: one op that saves little for its gradient."""
