"""Linear transforms of vectors and matrices."""
