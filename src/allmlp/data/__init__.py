"""Datasets, one dataset or format per file, and image augmentation."""
