"""Networks that are split over contexts layer by layer, and trained by micro-batches that follow one another."""
