"""How ranks find each other: launcher environment, store, address exchange, opening transports."""
