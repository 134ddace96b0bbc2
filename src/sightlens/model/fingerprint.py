"""What a model is, in a few characters: for records that must not be mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sightlens.interventions import Mean
from sightlens.model.cache import Cache

SAMPLES = 4096


def fingerprint(model: nn.Module) -> str:
    """Hash names, shapes, types and up to 4,096 evenly spaced values of every parameter and buffer.

    Reading all of a 7B model takes longer than many studies; a checkpoint that differs anywhere by training differs here.

    Returns:
        16 hexadecimal digits.
    """
    return _digest(model.state_dict())


def donor_digest(donor: Cache | Mean | Tensor) -> str:
    """Hash a donor in the same way.

    Returns:
        16 hexadecimal digits.
    """
    if isinstance(donor, Mean):
        parts = {f"{site} {name}": vector for site, held in donor.parts.items() for name, vector in held.items()}
        return _digest({"vector": donor.vector, **donor.companions, **parts})
    return _digest(donor if isinstance(donor, Cache) else {"vector": donor})


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        step = max(1, tensor.numel() // SAMPLES)
        sample = tensor.detach().flatten()[::step].cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
