"""A small transformers Trainer with accumulation, with one more line."""

import argparse

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)


class Sentences(torch.utils.data.Dataset):
    """Random token sequences of several lengths, padded; as labels the tokens or a class."""

    def __init__(self, size, has_classes):
        generator = torch.Generator().manual_seed(7)
        self.samples = []
        for _ in range(size):
            length = int(torch.randint(4, 13, (), generator=generator))
            ids = torch.randint(1, 40, (12,), generator=generator)
            mask = torch.arange(12) < length
            labels = torch.randint(0, 3, (), generator=generator) if has_classes else ids.masked_fill(~mask, -100)
            self.samples.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Classifier(nn.Module):
    """A module of one's own whose loss is a mean and which knows no num_items_in_batch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask.unsqueeze(-1).to(self.out.weight.dtype)
        logits = self.out((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class OwnLoss(Trainer):
    """Takes the labels out of a batch and computes the loss itself, as the Trainer's documentation shows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def network(kind):
    if kind == "llama":
        sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    if kind == "bert":
        sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(BertConfig(**sizes, **dropout, num_attention_heads=2, num_labels=3))
    return Classifier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--loads", type=float, nargs="*")
    parser.add_argument("--model", choices=["llama", "bert", "own"], default="llama")
    parser.add_argument("--folder", default="trainer")
    parser.add_argument("--resume")
    parser.add_argument("--max-steps", type=int, default=-1)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = network(arguments.model).double()
    dataset = Sentences(33, arguments.model != "llama")
    options = TrainingArguments(
        output_dir=arguments.folder,
        use_cpu=True,
        num_train_epochs=2,
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.batch_size,
        gradient_accumulation_steps=2,
        learning_rate=0.5,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_strategy="steps" if arguments.max_steps > 0 else "no",
        save_steps=1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=11,
    )
    kind = OwnLoss if arguments.model == "bert" else Trainer
    trainer = kind(model=model, args=options, train_dataset=dataset)
    if arguments.loads:
        from gangline.integrations.transformers import balance

        trainer = balance(trainer, loads=arguments.loads)
    trainer.train(resume_from_checkpoint=arguments.resume)
    if trainer.is_world_process_zero():
        losses = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        torch.save({**model.state_dict(), "losses": losses}, arguments.output)


if __name__ == "__main__":
    main()
