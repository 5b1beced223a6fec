"""Starting the processes of a job: `gangline launch`, a file a launcher."""
