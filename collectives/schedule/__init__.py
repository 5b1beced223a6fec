"""A collective as data: steps, verification, cost and drawing. No torch, no sockets."""
