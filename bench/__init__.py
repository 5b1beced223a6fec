"""Measurements of gangline, side by side with the programs that users would otherwise run.

A file for each bench; driver/ runs processes, peers/ holds the measured programs, report/ prints and draws results.
"""
