"""Models and their presets; `allmlp.models.zoo` creates them by name."""
