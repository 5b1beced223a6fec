"""The sides of a bench, gangline's own and its peers': a file for each, run by `serve.py` in an interpreter of its own.

A file is named ``<who>_<bench>.py`` and has ``prepare(options)``, which returns a dict: ``who`` (name and version),
``step`` (a function: what is measured, once), ``wait`` (a function: returns when all that was begun is over), and,
where results can be checked, ``check`` (a function: the largest absolute error). It imports what its own interpreter
has and nothing from this folder but what lies beside it.
"""
