"""Start ranks on this host: spawn(), the fork server, and the entry function of a rank's process."""
