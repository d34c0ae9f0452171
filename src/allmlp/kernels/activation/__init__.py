"""Activations and their gradients, fused with the bias and its gradient."""
