"""Starting ranks on this host: spawn(), the fork server, and what a rank's process runs."""
