"""Pipeline parallelism: layers split over contexts, trained with micro-batches."""
