"""Matrix products over tokens for training, at full speed for any number of tokens."""
