"""Losses as exact sums over shares of a batch, their scale and their normaliser."""
