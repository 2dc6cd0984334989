"""Models that are not transformers', each with the role table that its source code has."""
