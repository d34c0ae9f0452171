"""Image augmentation: one random draw per picture, computed for the whole batch where the batch is."""
