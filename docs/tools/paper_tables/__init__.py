"""Generator of the papers' tables that `allmlp tables` prints: `make tables` in a checkout.

vision.py and language.py hold what the papers print, measurements.py collects what docs/ reports, and generate.py adds
what the library counts and writes src/allmlp/report/tables.json and src/allmlp/plan/speeds.json.
"""
