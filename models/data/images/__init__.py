"""Folders of images: listing and reading them, here or in a bucket, splitting, augmenting."""
