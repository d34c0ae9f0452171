"""Models and their presets. `allmlp.models.zoo` finds them by name."""
