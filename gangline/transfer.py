"""Transfer learning: load trained weights, replace the last layer, and train layers at different rates."""

from __future__ import annotations

from gangline.models.zoo.transfer import freeze_until as freeze_until
from gangline.models.zoo.transfer import learning_rate_factors as learning_rate_factors
from gangline.models.zoo.transfer import pretrained as pretrained
from gangline.models.zoo.transfer import replace_last_layer as replace_last_layer
from gangline.models.zoo.transfer import scale_batch as scale_batch
