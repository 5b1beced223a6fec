"""Commands that train networks and use trained ones."""
