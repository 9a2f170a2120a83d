"""Grids in which an agent walks from cell to cell."""
