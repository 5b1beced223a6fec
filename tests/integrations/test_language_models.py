"""docs/language-models.md: a LoRA fine-tune by transformers, peft and trl on two ranks, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.trainers import told
from tests.models.measure import distance
from tests.programs import ROOT

pytest.importorskip("trl")
pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = ROOT / "docs" / "examples" / "finetune.py"


def run(folder: Path, *arguments: str) -> str:
    command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", "-m", "gangline", "run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, PROGRAM, *arguments], cwd=folder, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_the_program_trains_saves_an_adapter_and_resumes(tmp_path: Path) -> None:
    assert "'train_loss'" in run(tmp_path)
    folder = tmp_path / "finetuned"
    assert (folder / "adapter_model.safetensors").exists()
    first = (folder / "adapter_model.safetensors").read_bytes()
    for left in (folder / "checkpoint-8").iterdir():
        left.unlink()
    (folder / "checkpoint-8").rmdir()
    resumed = run(tmp_path, "resume")
    assert "'epoch': '2'" in resumed
    assert "'epoch': '1'" not in resumed  # it went on after checkpoint-4
    assert len((folder / "adapter_model.safetensors").read_bytes()) == len(first)


def tuned(folder: str, batch_size: int, loads: list[float] | None) -> dict[str, list[float]]:
    """Return the adapter's weights after two epochs; trl computes the loss in float32."""
    sys.path.insert(0, str(PROGRAM.parent))
    from finetune import trainer_of

    from gangline.integrations.transformers import balance

    options = {"optim": "sgd", "lr_scheduler_type": "constant", "disable_tqdm": True, "save_strategy": "no"}
    trainer = trainer_of(folder, batch_size, **{**options, "learning_rate": 5.0})
    trainer.model.double()
    if loads:
        trainer = balance(trainer, loads=loads)
    trainer.train()
    adapter = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
    return {name: one.detach().flatten().tolist() for name, one in adapter.items()}


def test_unequal_ranks_get_the_adapter_of_one_process(tmp_path: Path) -> None:
    [alone] = told(tuned, tmp_path, 16, None, size=1)
    assert any(max(map(abs, one)) > 0.01 for name, one in alone.items() if "lora_B" in name)
    for found in told(tuned, tmp_path, 8, [3, 1]):
        assert distance(*({name: torch.tensor(each) for name, each in of.items()} for of in (found, alone))) <= 1e-6
