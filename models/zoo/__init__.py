"""Networks by name, and transfer learning."""

from __future__ import annotations

from gangline.models.zoo import networks  # noqa: F401  registers them
from gangline.models.zoo.registry import Entry as Entry
from gangline.models.zoo.registry import create as create
from gangline.models.zoo.registry import create_network as create_network
from gangline.models.zoo.registry import find as find
from gangline.models.zoo.registry import names as names
from gangline.models.zoo.registry import register as register
