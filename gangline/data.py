"""Data sets and folders of images."""

from __future__ import annotations

from gangline.models.data.datasets import digits as digits
from gangline.models.data.datasets import image_folder as image_folder
from gangline.models.data.datasets import raw_digits as raw_digits
from gangline.models.data.datasets import split_each_label as split_each_label
from gangline.models.data.datasets import synthetic as synthetic
from gangline.models.data.images.augmentation import Augmentation as Augmentation
from gangline.models.data.images.folder import ImageFolder as ImageFolder
from gangline.models.data.images.patches import ImagePatches as ImagePatches
from gangline.models.data.images.patches import class_weights as class_weights
from gangline.models.data.sources import read_speed as read_speed
