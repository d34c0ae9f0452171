"""A matrix over tokens times the tokens, fused with norm, bias, activation, gate and residual."""
