"""Train many networks: a queue of trials over all devices."""
