"""Syntax errors: their messages, and how parsing goes on behind them."""
