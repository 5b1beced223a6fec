"""Benches of the collectives' algorithms: their cost on a described cluster, and which is fastest on this machine."""
