"""Affine in fp8, with a scale for each row."""
