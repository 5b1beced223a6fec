"""Splitting batches over contexts by their measured speed and memory (``work_load_list="auto"``)."""
