"""Image folders: listing and reading, locally or from object stores; stratified splits; augmentation."""
