"""Activations and their gradients, with biases and their sums in the same pass."""
