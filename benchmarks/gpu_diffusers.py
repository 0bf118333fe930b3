"""The same layer in diffusers, with the same weights, beside ours. It takes dense batches of one shape, so
sequences of different shapes run one after another there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_common import AbsentError, Setup, elapsed_ms, medians_ms, rounded
from gpu_layer import LayerInputs, PackedLayer
from gpu_reference import l2_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as plain_checkpoint

from zellige_lightning.placement import Bucket
from zellige_lightning.recipes.wan21.layouts import to_diffusers
from zellige_lightning.simulator.constants import image

Call = tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]


class DiffusersLayer:
    """Block 0 of a one-layer WanTransformer3DModel with our block's weights. Raises: AbsentError."""

    def __init__(self, ours: PackedLayer) -> None:
        try:
            from diffusers import WanTransformer3DModel
        except ImportError as reason:
            raise AbsentError(f"diffusers cannot be imported: {reason}") from reason
        config, device = ours.config, ours.setup.device
        model: Any = WanTransformer3DModel(
            patch_size=config.patch_size,
            num_attention_heads=config.num_heads,
            attention_head_dim=config.head_dim,
            in_channels=config.in_dim,
            out_channels=config.out_dim,
            text_dim=config.text_dim,
            freq_dim=config.freq_dim,
            ffn_dim=config.ffn_dim,
            num_layers=1,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            eps=config.eps,
        )
        self.block: nn.Module = model.blocks[0].to(device)
        self.rope: nn.Module = model.rope.to(device)
        prefix = "blocks.0."
        state = {
            to_diffusers(prefix + name).removeprefix(prefix): parameter
            for name, parameter in ours.block.state_dict().items()
        }
        self.block.load_state_dict(state, strict=True)
        self._ours = ours

    def calls(self, buckets: list[Bucket], inputs: LayerInputs) -> list[tuple[Call, Tensor]]:
        """Arguments and output gradients: one dense call if all shapes are equal, else one per sequence."""
        config, device = self._ours.config, self._ours.setup.device
        together = len(set(buckets)) == 1
        groups = [list(range(len(buckets)))] if together else [[i] for i in range(len(buckets))]
        rows = inputs.x.detach().split([b.num_tokens for b in buckets])
        douts = inputs.dout.split([b.num_tokens for b in buckets])
        text = inputs.text.detach().unflatten(0, (len(buckets), config.text_len))
        calls = []
        for members in groups:
            frames, height, width = buckets[members[0]].grid
            latents = torch.empty(1, config.in_dim, frames, 2 * height, 2 * width, device=device)
            leaves = (
                torch.stack([rows[i] for i in members]).requires_grad_(),
                text[members].clone().requires_grad_(),
                inputs.time.detach()[members].clone().requires_grad_(),
            )
            calls.append(((*leaves, self.rope(latents)), torch.stack([douts[i] for i in members])))
        return calls

    def forward(self, arguments: Call) -> Tensor:
        with torch.autocast(self._ours.setup.device.type, torch.bfloat16):
            return plain_checkpoint(self.block, *arguments, use_reentrant=False)

    def step(self, calls: list[tuple[Call, Tensor]]) -> None:
        for arguments, dout in calls:
            self.forward(arguments).backward(dout)
            for tensor in (*self.block.parameters(), *arguments[:3]):
                tensor.grad = None


def workloads(setup: Setup) -> dict[str, list[Bucket]]:
    if setup.tiny:
        small, clip = Bucket("image", (1, 4, 4)), Bucket("video", (3, 4, 4))
        return {"one sequence": [clip], "equal images": [small] * 3, "mix": [clip, small, small]}
    small, medium, large = map(image, ("256p", "480p", "720p"))
    clip = Bucket("video-480p-5s", (21, 30, 52))
    return {
        "one sequence": [clip],
        "equal images": [large] * 8,
        "mix": [Bucket("video-480p-1s", (5, 30, 52)), *[large] * 2, *[medium] * 4, *[small] * 16],
    }


def check(setup: Setup) -> None:
    """First that both compute the same, then a row of times for each workload."""
    ours = PackedLayer(setup)
    theirs = DiffusersLayer(ours)
    setup.record(same_function(ours, theirs, workloads(setup)["mix"]))
    for name, buckets in workloads(setup).items():
        if setup.remaining_s > 5.0:
            setup.record(compared(name, ours, theirs, buckets))


def same_function(ours: PackedLayer, theirs: DiffusersLayer, buckets: list[Bucket]) -> dict[str, Any]:
    """Deviation of outputs and of input gradients; bf16 rounding alone gives about one percent."""
    inputs = ours.inputs(buckets)
    with ours.router.answered_by(ours.engine):
        out = ours.forward(inputs)
        out.backward(inputs.dout)
    outs, gradients = [], []
    for arguments, dout in theirs.calls(buckets, inputs):
        part = theirs.forward(arguments)
        part.backward(dout)
        assert arguments[0].grad is not None
        outs.append(part.detach().flatten(0, 1))
        gradients.append(arguments[0].grad.flatten(0, 1))
    assert inputs.x.grad is not None
    row = {
        "comparison": "outputs and gradients of the mix",
        "out_deviation": rounded(l2_error(out.detach(), torch.cat(outs).double()), 3),
        "gradient_deviation": rounded(l2_error(inputs.x.grad, torch.cat(gradients).double()), 3),
    }
    ours.drop_gradients(inputs)
    return row


def compared(name: str, ours: PackedLayer, theirs: DiffusersLayer, buckets: list[Bucket]) -> dict[str, Any]:
    setup, inputs = ours.setup, ours.inputs(buckets)
    calls = theirs.calls(buckets, inputs)
    variants: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.step(inputs),
        "diffusers": lambda: theirs.step(calls),
    }
    once = sum(elapsed_ms(run, setup.device) for run in variants.values())
    repeats = max(1, min(setup.repeats, int(250 * setup.remaining_s / once)))
    times = medians_ms(variants, setup.device, repeats)
    return {
        "workload": name,
        "tokens": sum(b.num_tokens for b in buckets),
        "sequences": len(buckets),
        "repeats": repeats,
        "ours_ms": rounded(times["ours"]),
        "diffusers_ms": rounded(times["diffusers"]),
        "diffusers_calls": len(calls),
        "speedup": rounded(times["diffusers"] / times["ours"], 3),
    }
