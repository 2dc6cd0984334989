"""Changes of weights as sums of thin products."""
