"""The parameter server: a scheduler, servers, and the store that a worker sees (`dist_*`)."""
