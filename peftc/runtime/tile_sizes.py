"""Sizes of the blocks that one program of the kernel works on."""

ROWS = 16  # of x, at most: the least that a product of matrix units has
OUTPUTS = 64  # of a block of the weight, which one program reads
