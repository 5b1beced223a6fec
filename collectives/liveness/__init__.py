"""Which ranks are alive: membership, watchdog, process state, and every time limit."""
