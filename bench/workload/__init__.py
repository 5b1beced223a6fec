"""What a bench measures: networks, images, contexts, sizes and the shapes of collectives."""
