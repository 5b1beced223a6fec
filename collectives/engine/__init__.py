"""Execution of one call: argument checks, staging, reduction, small messages, schedules, point-to-point."""
