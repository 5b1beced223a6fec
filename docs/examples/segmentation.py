"""A U-Net learns to segment scenes of handwritten digits from random patches, and predicts whole images in tiles.

`python segmentation.py` trains on two CPU contexts for a few minutes and writes segmentation.png. `gangline train`
takes the network by name as well: `--network segmentation:unet`.
"""

from pathlib import Path

import numpy as np
import torch
from gangline import Module, cpu
from gangline.data import Augmentation, ImagePatches, class_weights, raw_digits
from PIL import Image
from torch import nn
from torchmetrics.classification import MulticlassJaccardIndex

COLORS = np.array([(0, 0, 0), (11, 114, 133), (217, 72, 15), (138, 63, 252), (230, 167, 0)])
"""Color of each class; the ground, class 0, is not drawn."""
INK = 5
"""Level of a digit's pixel, of 16, from which it belongs to the digit."""


class UNet(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, num_classes, height, width).

    After Ronneberger, Fischer and Brox, "U-Net: Convolutional networks for biomedical image segmentation", 2015, with
    padded convolutions and batch normalization. Height and width must be multiples of 2 ** depth.
    """

    def __init__(self, num_classes: int, channels: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            block(before, after) for before, after in zip([channels, *widths[:-1]], widths, strict=True)
        )
        self.dropout = nn.Dropout2d(dropout)
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(before, after, 2, stride=2)
            for before, after in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.up = nn.ModuleList(block(2 * after, after) for after in widths[-2::-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of each pixel."""
        kept = []
        features = self.down[0](images)
        for down in self.down[1:]:
            kept.append(features)
            features = down(nn.functional.max_pool2d(features, 2))
        features = self.dropout(features)
        for widen, up in zip(self.widen, self.up, strict=True):
            features = up(torch.cat([kept.pop(), widen(features)], dim=1))
        return self.head(features)


def block(before: int, after: int) -> nn.Sequential:
    """Build two convolutions."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def unet(num_classes: int = 2, channels: int = 1, width: int = 16, depth: int = 3, dropout: float = 0.0) -> nn.Module:
    """Build a U-Net that halves the resolution ``depth`` times; ``num_classes`` includes the ground."""
    return UNet(num_classes, channels, width, depth, dropout)


unet.image_shape = (1, 64, 64)


def digit_scenes(
    count: int, size: int = 96, *, digits: tuple[int, ...] = (0, 1, 4, 7), per_scene: int = 6, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compose scenes of digits at random places on a noisy ground, 2 to 3 times as large as they are stored.

    Returns:
        Pixels, uint8 of (count, size, size), and classes of the same shape: 1 + the digit's place in ``digits``, or 0.
    """
    levels, labels = raw_digits()
    generator = torch.Generator().manual_seed(seed)
    images = (torch.randn(count, size, size, generator=generator) * 12 + 40).clamp(0, 255)
    masks = torch.zeros(count, size, size, dtype=torch.uint8)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    of_digit = {digit: levels[labels == digit] for digit in digits}
    for image, mask in zip(images, masks, strict=True):
        for _ in range(per_scene):
            kind = draw(len(digits))
            samples = of_digit[digits[kind]]
            side = 16 + draw(9)
            stored = samples[draw(len(samples))][None, None].float()
            digit = nn.functional.interpolate(stored, (side, side), mode="bilinear", align_corners=False)[0, 0]
            top, left = draw(size - side + 1), draw(size - side + 1)
            ink = digit >= INK
            image[top : top + side, left : left + side][ink] = 60 + 12 * digit[ink]
            mask[top : top + side, left : left + side][ink] = kind + 1
    return images.round().clamp(0, 255).to(torch.uint8), masks


def write_scenes(folder: str | Path, images: torch.Tensor, masks: torch.Tensor) -> tuple[Path, Path]:
    """Write images and masks as PNG files, for `ImagePatches`; return the two folders."""
    folders = Path(folder) / "images", Path(folder) / "masks"
    for path, values in zip(folders, (images, masks), strict=True):
        path.mkdir(parents=True, exist_ok=True)
        for number, pixels in enumerate(values):
            Image.fromarray(np.asarray(pixels)).save(path / f"{number:04}.png")
    return folders


def predict_image(
    module: Module, image: torch.Tensor, tile: tuple[int, int], overlap: float = 0.5, batch_size: int = 16
) -> torch.Tensor:
    """Return the class probabilities of each pixel of an image of any size, (classes, height, width).

    The image is cut into tiles, of which each covers a part ``overlap`` of the one before it. They are batches of
    `Module.predict`, so all contexts compute them. A pixel gets the mean of its tiles, weighted by its distance from
    their edges, where a network sees least.
    """
    height, width = image.shape[1:]
    padded = nn.functional.pad(image, (0, max(tile[1] - width, 0), 0, max(tile[0] - height, 0)))
    places = [
        (top, left)
        for top in starts(padded.shape[1], tile[0], overlap)
        for left in starts(padded.shape[2], tile[1], overlap)
    ]
    tiles = torch.stack([padded[:, top : top + tile[0], left : left + tile[1]] for top, left in places])
    predicted = module.predict(tiles, batch_size=batch_size).softmax(1)
    weight = (ramp(tile[0])[:, None] * ramp(tile[1])).to(predicted)
    total = predicted.new_zeros((predicted.shape[1], *padded.shape[1:]))
    weights = predicted.new_zeros(padded.shape[1:])
    for (top, left), values in zip(places, predicted, strict=True):
        total[:, top : top + tile[0], left : left + tile[1]] += values * weight
        weights[top : top + tile[0], left : left + tile[1]] += weight
    return (total / weights)[:, :height, :width]


def starts(length: int, side: int, overlap: float) -> list[int]:
    """Return where tiles begin: evenly, the first at 0, the last one at the end."""
    step = max(int(side * (1 - overlap)), 1)
    count = -(-(length - side) // step) + 1
    return [round(number * (length - side) / max(count - 1, 1)) for number in range(count)]


def ramp(side: int) -> torch.Tensor:
    """Return weights that rise from the edges to the middle."""
    places = torch.arange(side, dtype=torch.float64) + 0.5
    return torch.minimum(places, side - places) / side


def overlay(image: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Return an image with its labels laid over it, uint8 of (height, width, 3)."""
    pixels = image.mean(0).double().numpy()
    grey = np.repeat(((pixels - pixels.min()) / np.ptp(pixels) * 255)[..., None], 3, axis=2)
    drawn = labels.numpy() > 0
    grey[drawn] = 0.45 * grey[drawn] + 0.55 * COLORS[labels.numpy()[drawn]]
    return grey.astype(np.uint8)


def main(scenes: int = 120, held_out_scenes: int = 20, epochs: int = 40, width: int = 12) -> float:
    """Train, predict the held-out scenes, and write them with masks and predictions; return the mean IoU."""
    torch.manual_seed(0)
    turns = Augmentation(rotate=(-10, 10), scale=(0.9, 1.1))
    folders = write_scenes("scenes/train", *digit_scenes(scenes))
    train = ImagePatches(*folders, 64, channels=1, patches_per_image=2, augmentation=turns)
    held_out = ImagePatches(*write_scenes("scenes/test", *digit_scenes(held_out_scenes, seed=1)), 64, channels=1)
    loss = nn.CrossEntropyLoss(class_weights(train.class_counts(5)))
    module = Module(unet(5, width=width, dropout=0.1), loss, [cpu(0), cpu(1)], random="sample")
    params = {"learning_rate": 0.004}
    module.fit(train, num_epoch=epochs, batch_size=16, kvstore="local", optimizer="adam", optimizer_params=params)

    jaccard, rows = MulticlassJaccardIndex(5), []
    for number in range(held_out_scenes):
        image, mask = held_out.whole(number)
        predicted = predict_image(module, image, (64, 64)).argmax(0)
        jaccard.update(predicted[None], mask[None])
        rows.append(
            np.hstack([overlay(image, torch.zeros_like(mask)), overlay(image, mask), overlay(image, predicted)])
        )
    Image.fromarray(np.vstack(rows)).save("segmentation.png")
    module.close()
    return float(jaccard.compute())


if __name__ == "__main__":
    print(f"mean IoU {main():.3f}; images, masks and predictions are in segmentation.png")
