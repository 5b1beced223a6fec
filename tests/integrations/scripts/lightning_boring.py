"""Lightning's BoringModel with accumulation, with one more callback."""

import argparse
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class BoringModel(pl.LightningModule):
    def __init__(self, batch_size):
        super().__init__()
        self.layer = nn.Linear(32, 2)
        self.batch_size = batch_size
        self.lr = 0.1

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        data, label = batch
        loss = nn.functional.mse_loss(self(data), label)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("x", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def dataset(self):
        generator = torch.Generator().manual_seed(5)
        return TensorDataset(torch.randn(65, 32, generator=generator), torch.randn(65, 2, generator=generator))

    def train_dataloader(self):
        dataset = self.dataset()
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            return DataLoader(dataset, self.batch_size, shuffle=True)
        return DataLoader(dataset, self.batch_size, sampler=DistributedSampler(dataset, 1, 0))  # the order of 2 ranks

    def val_dataloader(self):
        return DataLoader(self.dataset(), 16)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--loads", type=float, nargs="*")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--resume")
    parser.add_argument("--find-rate", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    callbacks = []
    if arguments.loads:
        from gangline.integrations.lightning import Balance

        callbacks.append(Balance(loads=arguments.loads))
    world = int(os.environ.get("WORLD_SIZE", 1))
    trainer = pl.Trainer(
        max_epochs=2,
        max_steps=arguments.max_steps,
        accumulate_grad_batches=2,
        precision="64-true",
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel(arguments.batch_size)
    if arguments.find_rate:
        pl.tuner.Tuner(trainer).lr_find(model, num_training=4)
    trainer.fit(model, ckpt_path=arguments.resume)
    trainer.save_checkpoint(f"{arguments.output}.ckpt")
    if trainer.is_global_zero:
        torch.save({**model.state_dict(), "updates": torch.tensor(trainer.global_step)}, arguments.output)


if __name__ == "__main__":
    main()
