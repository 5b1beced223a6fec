"""Segmentation of whole images: prediction in tiles, pictures of scenes, and pages of overlays."""
