"""One line for the training loops of other packages, Lightning, the Hugging Face Trainer, Ray Train.

Nothing imports these files by default: each imports the package that it serves.
"""
