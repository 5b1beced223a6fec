"""Ranks of unequal speed: the bench of `gangline.balance`, and real limits of a process's CPU time."""
