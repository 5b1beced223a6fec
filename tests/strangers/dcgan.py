"""DCGAN: a generator and a discriminator on one batch, three backward passes a step."""

import torch
import utils
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gangline

latent, width = 8, 6
rank, world_size = utils.init_distributed(999)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 1, 2, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, image):
        return self.main(image).view(-1)


# Fixed noise for each image, so that a run can be repeated.
dataset = TensorDataset(torch.randn(98, 1, 8, 8).tanh(), torch.randn(98, latent, 1, 1))
loader = DataLoader(dataset, batch_size=24 // world_size)

generator, discriminator = Generator(), Discriminator()
if world_size > 1:
    generator = utils.wrap(gangline.convert_sync_batchnorm(generator))
    discriminator = utils.wrap(gangline.convert_sync_batchnorm(discriminator))
    loader = gangline.balance([generator, discriminator], loader)

criterion = nn.BCELoss()
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))

for _epoch in range(2):
    for real, noise in loader:
        # Train with an all-real batch, then with an all-fake one.
        discriminator.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        loss_real = criterion(discriminator(real), label)
        loss_real.backward()
        fake = generator(noise)
        label.fill_(0.0)
        loss_fake = criterion(discriminator(fake.detach()), label)
        loss_fake.backward()
        d_optimizer.step()

        generator.zero_grad()
        label.fill_(1.0)  # fake labels are real for the generator's cost
        loss_g = criterion(discriminator(fake), label)
        loss_g.backward()
        g_optimizer.step()
    print(f"Loss_D: {loss_real + loss_fake:.4f} Loss_G: {loss_g:.4f}")

utils.save(generator=generator, discriminator=discriminator)
