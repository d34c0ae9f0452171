"""The sum over the rows of a matrix, the last step of many gradients."""
