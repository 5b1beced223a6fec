"""The scheduler: membership, barriers and exchanges of a job."""
