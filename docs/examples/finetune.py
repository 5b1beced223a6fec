"""Fine-tune a causal language model with LoRA on unequal GPUs: transformers, peft and trl, texts of unequal length.

torchrun --nproc-per-node 2 -m gangline run finetune.py
"""

import random
import sys

import torch
from datasets import Dataset
from gangline.integrations.transformers import balance
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = [f"word{number}" for number in range(200)]


def model_and_tokenizer() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a small model with random weights; in place of it: AutoModelForCausalLM.from_pretrained(...)."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), pad_token_id=0, eos_token_id=1, **sizes)), tokenizer


def texts(number: int = 64) -> Dataset:
    """Return texts of 4 to 120 words; in place of them: load_dataset(...)."""
    draw = random.Random(0)
    return Dataset.from_list([{"text": " ".join(draw.choices(WORDS, k=draw.randint(4, 120)))} for _ in range(number)])


def trainer_of(folder: str, batch_size: int = 8, **options: object) -> SFTTrainer:
    """Return trl's trainer, on GPUs if there are any; ``options`` are SFTConfig's."""
    model, tokenizer = model_and_tokenizer()
    defaults = {"num_train_epochs": 2, "learning_rate": 1e-3, "max_length": 128, "save_steps": 4, "logging_steps": 2}
    on_gpu = torch.cuda.is_available()
    defaults |= {"per_device_train_batch_size": batch_size, "bf16": on_gpu, "use_cpu": not on_gpu, "report_to": "none"}
    args = SFTConfig(folder, **{**defaults, **options})
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return SFTTrainer(model, args=args, train_dataset=texts(), processing_class=tokenizer, peft_config=lora)


if __name__ == "__main__":
    trainer = trainer_of("finetuned")
    trainer = balance(trainer)  # the only new line
    trainer.train(resume_from_checkpoint="resume" in sys.argv)
    trainer.save_model()  # on rank 0
