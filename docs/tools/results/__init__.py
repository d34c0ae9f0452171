"""Generator of the tables and figures in README.md, docs/results.md, benchmarks/README.md and the recipes' docstrings.

`make results` in a checkout. records.py reads what was measured, images.py, language.py, own_data.py and speed.py have
one function per table, and pages.py puts them between `<!-- results: NAME -->` and `<!-- end -->`. bundled.py and
floors.py measure.
"""
