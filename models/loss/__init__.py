"""Losses as exact sums over shares of a batch, their normalizers, and the scale of float16 losses."""
