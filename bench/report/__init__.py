"""Results of a bench: rows, tables, ratios, JSON files and plots."""
