"""Timeline: a Chrome trace of all processes of a job, on one clock."""
