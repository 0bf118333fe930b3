"""One block of Wan2.1 on packed sequences, as it trains: fp32 weights, bf16 autocast, checkpointed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from gpu_common import Setup, random_tensor
from torch import Tensor

from zellige_lightning.batch import positions_of
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine, checkpoint
from zellige_lightning.placement import Bucket, RankSchedule, build_schedule, whole
from zellige_lightning.recipes.wan21.layers import rope_table
from zellige_lightning.recipes.wan21.model import Packing, WanBlock, WanModel


@dataclass(frozen=True)
class LayerInputs:
    """x `[T, d]` bf16 and the gradient `dout` of the output, time `[S, 6, d]` fp32,
    text `[S * text_len, d]` bf16."""

    x: Tensor
    time: Tensor
    text: Tensor
    packing: Packing
    dout: Tensor
    schedule: RankSchedule

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Packing]:
        return self.x, self.time, self.text, self.packing


class PackedLayer:
    """A block with the model's own initial weights, its attention answered by an engine of one rank."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(0)
        self.setup, self.config = setup, setup.config
        with setup.device:
            model = WanModel(replace(self.config, num_layers=1))
        self.block = cast(WanBlock, model.blocks[0])
        self.engine = CoalescedAttentionEngine()
        self.router = AttentionRouter()
        self.router.attach("block.self_attn", self.block.self_attn)

    def inputs(self, buckets: Sequence[Bucket], seed: int = 0) -> LayerInputs:
        """Random activations of whole sequences of these shapes."""
        setup, config, lengths = self.setup, self.config, [b.num_tokens for b in buckets]
        counts: Any = torch.tensor(lengths, dtype=torch.int64)
        positions = torch.cat([positions_of(range(b.num_tokens), b.grid) for b in buckets]).to(setup.device)
        packing = Packing(
            torch.repeat_interleave(torch.arange(len(lengths)), counts).to(setup.device),
            counts,
            rope_table(positions, config.rope_pairs),
            config.text_len,
        )
        rows = (sum(lengths), config.dim)
        text = (len(lengths) * config.text_len, config.dim)
        return LayerInputs(
            random_tensor(rows, torch.bfloat16, setup, seed).requires_grad_(),
            random_tensor((len(lengths), 6, config.dim), torch.float32, setup, seed + 1).requires_grad_(),
            random_tensor(text, torch.bfloat16, setup, seed + 2).requires_grad_(),
            packing,
            random_tensor(rows, torch.bfloat16, setup, seed + 3),
            build_schedule([whole(0)] * len(lengths), lengths, 0, 1),
        )

    def forward(self, inputs: LayerInputs) -> Tensor:
        """`[T, d]`; call `backward` of the result within the same `router.answered_by`."""
        self.engine.install(inputs.schedule)
        with torch.autocast(self.setup.device.type, torch.bfloat16):
            return checkpoint(self.block, *inputs.arguments, engine=self.engine)

    def step(self, inputs: LayerInputs) -> None:
        """Forward and backward; gradients are dropped."""
        with self.router.answered_by(self.engine):
            self.forward(inputs).backward(inputs.dout)
        self.drop_gradients(inputs)

    def drop_gradients(self, inputs: LayerInputs) -> None:
        for tensor in (*self.block.parameters(), inputs.x, inputs.time, inputs.text):
            tensor.grad = None
