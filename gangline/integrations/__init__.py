"""One line for the training loops of other packages, Lightning and the Hugging Face Trainer, and jobs on Ray.

Nothing imports these files by default: each imports the package that it serves.
"""
