"""Comparison of runs on one HTML page, and the tables of the papers."""
