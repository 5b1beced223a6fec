"""Predictions of step times and splits, for `gangline advise`, `gangline train --advise` and `gangline balance`."""
