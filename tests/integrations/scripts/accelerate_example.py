"""The shape of accelerate's cv_example and nlp_example with gradient accumulation, with one more line."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gangline


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--loads", type=float, nargs="*")
    parser.add_argument("--resume", action="store_true", help="save and load after two batches of the second epoch")
    parser.add_argument("--split-batches", action="store_true")
    arguments = parser.parse_args()
    config = DataLoaderConfiguration(split_batches=arguments.split_batches, use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    images, labels = torch.rand(65, 1, 6, 6), torch.randint(0, 4, (65,))
    train_dataloader = DataLoader(TensorDataset(images, labels), arguments.batch_size, shuffle=True)
    eval_dataloader = DataLoader(TensorDataset(images, labels), 16)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    if arguments.loads:
        train_dataloader = gangline.balance(model, train_dataloader, loads=arguments.loads)
    updates = 0
    if arguments.resume:
        accelerator.register_for_checkpointing(train_dataloader)

    def train(batches=None):
        nonlocal updates
        model.train()
        for step, (inputs, targets) in enumerate(train_dataloader, 1):
            assert inputs.device.type == accelerator.device.type
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                updates += accelerator.sync_gradients
            if step == batches:
                accelerator.save_state(f"{arguments.output}.state")
                break

    for epoch in range(2):
        if epoch == 1 and arguments.resume:
            train(batches=2)
            accelerator.wait_for_everyone()  # rank 0 writes the state of the optimizer
            accelerator.load_state(f"{arguments.output}.state")
        train()
        assert accelerator.gradient_state.active_dataloader is None
        model.eval()
        seen = 0
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            seen += len(references)
        assert seen == 65
    accelerator.print(f"{updates} updates")
    if accelerator.is_main_process:
        torch.save({**accelerator.unwrap_model(model).state_dict(), "updates": torch.tensor(updates)}, arguments.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
