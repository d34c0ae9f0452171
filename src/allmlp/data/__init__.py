"""Data: one dataset or format per file; `source` says what a dataset is, `images` changes pictures on the device."""
