"""From equations to torch: code, modules of parameters, first values, folds."""
