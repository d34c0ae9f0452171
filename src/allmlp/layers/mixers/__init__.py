"""Token mixers: one file is one way for tokens to exchange information."""

from allmlp.spec import discover

# Registers the spec of every file beside this one.
discover(__name__)
