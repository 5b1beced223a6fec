"""The programs that a bench measures, gangline's own and its peers', a folder for each bench and a file for each peer.

`serve.py` loads such a file in the peer's interpreter; it documents what the file must define. A file imports only what
that interpreter has.
"""
