"""WGAN-GP: a critic with gradient penalty, which needs gradients of gradients."""

import torch
import utils
from torch import autograd, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gangline

LAMBDA, N_CRITIC = 10.0, 2
rank, world_size = utils.init_distributed(1)

points = torch.randn(110, 2) * 0.3 + torch.randint(4, (110, 1))
dataset = TensorDataset(points, torch.randn(110, 4), torch.rand(110, 1))
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
loader = DataLoader(dataset, batch_size=24 // world_size, sampler=sampler)

generator = utils.wrap(nn.Sequential(nn.Linear(4, 32), nn.ReLU(True), nn.Linear(32, 2)))
critic = utils.wrap(nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1)))
if world_size > 1:
    loader = gangline.balance([generator, critic], loader)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))


def gradient_penalty(real, fake, alpha):
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(between)
    gradients = autograd.grad(score, between, grad_outputs=torch.ones_like(score), create_graph=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


iteration = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for real, z, alpha in loader:
        with torch.no_grad():
            fake = generator(z)
        critic_optimizer.zero_grad()
        wasserstein = critic(fake).mean() - critic(real).mean()
        (wasserstein + LAMBDA * gradient_penalty(real, fake, alpha)).backward()
        critic_optimizer.step()

        iteration += 1
        if iteration % N_CRITIC == 0:
            for parameter in critic.parameters():
                parameter.requires_grad_(False)
            generator_optimizer.zero_grad()
            (-critic(generator(z)).mean()).backward()
            generator_optimizer.step()
            for parameter in critic.parameters():
                parameter.requires_grad_(True)
    print(f"epoch {epoch} W {-wasserstein:.4f}")

utils.save(generator=generator, critic=critic)
