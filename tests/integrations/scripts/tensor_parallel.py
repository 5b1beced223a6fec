"""Tensor parallelism of transformers on CPUs: layers that are split over the ranks give what whole ones do."""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
dist.init_process_group()
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=50,
)
whole = LlamaForCausalLM(config).eval()
if dist.get_rank() == 0:
    whole.save_pretrained(folder[0])
dist.barrier()
split = LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto").eval()
words = torch.arange(12).view(2, 6)
with torch.no_grad():
    difference = (split(words).logits - whole(words).logits).abs().max().item()
weight = split.model.layers[0].mlp.up_proj.weight
local = weight.to_local() if hasattr(weight, "to_local") else weight
sys.stdout.write(f"{dist.get_backend()} {tuple(local.shape)} {difference < 1e-5}\n")
dist.destroy_process_group()
