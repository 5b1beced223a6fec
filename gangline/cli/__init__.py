"""The gangline command, one file a subcommand."""
