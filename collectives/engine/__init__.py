"""Running one call: argument checks, staging, reduction, small messages, execution, point-to-point."""
