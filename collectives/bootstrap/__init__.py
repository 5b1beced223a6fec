"""Bootstrap: launcher environment, rendezvous through a store, and opening the transports of a group of ranks."""
