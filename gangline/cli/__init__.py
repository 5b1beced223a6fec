"""The gangline command, one file per subcommand."""
