"""A matrix over tokens times the tokens, with norm, bias, activation, gate and residual in the same pass."""
