"""What was published and what was measured: the papers' tables, and runs compared on one page."""
