"""Message transports between ranks: one file or folder per medium, all with the interface of base.py."""
