"""Blocks written as different people write them. Each file is a style; each table was written from
the code above it.
"""
