"""The training loop: fit, epochs, evaluation, callbacks, learning-rate schedules and stopping."""
