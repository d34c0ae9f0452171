"""Studies: tables of runs that can be stopped and continued, tuned on validation and evaluated once on test."""
