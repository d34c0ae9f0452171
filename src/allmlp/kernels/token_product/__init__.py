"""Products over tokens for training: any number of tokens at full speed."""
