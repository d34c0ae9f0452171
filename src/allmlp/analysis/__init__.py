"""Analysis of trained models, in numbers and figures.

Each file computes one quantity; `mixing`, `attention`, `depth` and `examples` turn them into sections of tables and
figures, and `analysis.analyze` runs all sections and writes them to a folder (`allmlp analyze`). Only `figures` draws.
"""
