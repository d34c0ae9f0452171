"""What a trained model has learnt, in numbers."""
