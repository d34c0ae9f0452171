"""Generator of the tables in README.md, docs/results.md, docs/further_results.md, docs/guides/properties.md,
benchmarks/README.md and the recipes' docstrings.

`make results` in a checkout. records.py reads what was measured, images.py, language.py, own_data.py, properties.py,
series.py and speed.py have one function per table, and pages.py puts them between `<!-- results: NAME -->` and
`<!-- end -->`. bundled.py and floors.py measure.
"""
