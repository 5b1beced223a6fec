"""`gangline bench faults`: jobs with scripted faults, and the table of what each one ends in."""
