"""Functions of tile-kernels 2.1.0: its signatures, what it asks of arguments, and the formulas in float64."""
