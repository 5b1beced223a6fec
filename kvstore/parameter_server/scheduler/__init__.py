"""Scheduler: registration, liveness, collectives and the end of a job."""
