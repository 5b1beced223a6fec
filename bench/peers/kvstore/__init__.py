"""Programs of one bench: one process that pushes and pulls the gradients of several contexts."""
