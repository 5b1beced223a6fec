"""The training loop: fit, epochs, evaluation, callbacks, schedules and stopping."""
