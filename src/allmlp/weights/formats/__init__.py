"""Weight formats of other libraries: one module per format, with the functions of `format.Format`."""
