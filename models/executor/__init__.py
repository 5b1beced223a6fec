"""Forward and backward over the replicas, in threads where contexts share a device; loads of the contexts."""
