"""What a model has learnt, in numbers and in pictures.

One file is one question; `survey` asks them all and writes the answers to a folder (`allmlp analyze`). Only `plots`
draws.
"""
