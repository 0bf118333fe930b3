"""`torch.compile` of a block around its checkpoint: graphs over several plans, and time against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_common import Setup, elapsed_ms, medians_ms, rounded
from gpu_layer import LayerInputs, PackedLayer
from gpu_reference import l2_error
from torch import Tensor

from zellige_lightning.engine import checkpoint
from zellige_lightning.placement import Bucket
from zellige_lightning.simulator.constants import image


class CountingBackend:
    """Counts the graphs that the compiler makes of a region. A rehearsal traces only (aot_eager)."""

    def __init__(self, setup: Setup) -> None:
        self.graphs = 0
        self.name = "aot_eager" if setup.tiny else "inductor"
        self._compile: Any = torch._dynamo.lookup_backend(self.name)

    def __call__(self, graph: Any, examples: Any) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._compile(graph, examples)
        self.graphs += 1  # not where the compiler starts a region over, by an exception from within
        return compiled


def plans(setup: Setup) -> list[list[Bucket]]:
    """Packs of different lengths and numbers of segments; the last is the one that is timed.

    None has as many tokens as rows of text: the compiler would take the two sizes for one.
    """
    if setup.tiny:
        small, clip = Bucket("image", (1, 4, 5)), Bucket("video", (3, 4, 4))
        return [[small] * 3, [clip, *[small] * 2], [clip] * 2]
    small, medium, large = map(image, ("256p", "480p", "720p"))
    return [
        [small] * 8,
        [medium] * 3,
        [large, *[small] * 5],
        [large, large, medium],
        [*[large] * 2, *[medium] * 4, *[small] * 8],
    ]


def check(setup: Setup) -> None:
    """A row per plan, as compiling may outlast the unit; then the times."""
    layer, backend = PackedLayer(setup), CountingBackend(setup)
    compiled = torch.compile(_region(layer), fullgraph=True, dynamic=True, backend=backend)
    eager = _region(layer)
    inputs = None
    for number, buckets in enumerate(plans(setup)):
        if setup.remaining_s < 5.0:
            return
        inputs = layer.inputs(buckets, seed=number)
        took = elapsed_ms(lambda: run(layer, compiled, inputs), setup.device)  # noqa: B023 - called at once
        setup.record(
            {
                "plan": number,
                "tokens": inputs.x.shape[0],
                "segments": len(buckets),
                "graphs": backend.graphs,
                "backend": backend.name,
                "first_run_s": rounded(took / 1e3, 3),
                "deviation_from_eager": rounded(deviation(layer, compiled, eager, inputs), 3),
            }
        )
    assert inputs is not None
    times = medians_ms(
        {"eager": lambda: run(layer, eager, inputs), "compiled": lambda: run(layer, compiled, inputs)},
        setup.device,
        setup.repeats,
    )
    setup.record(
        {
            "timed_tokens": inputs.x.shape[0],
            "graphs": backend.graphs,
            "eager_ms": rounded(times["eager"]),
            "compiled_ms": rounded(times["compiled"]),
            "speedup": rounded(times["eager"] / times["compiled"], 3),
        }
    )


def _region(layer: PackedLayer) -> Callable[..., Tensor]:
    def region(*arguments: Any) -> Tensor:
        return checkpoint(layer.block, *arguments, engine=layer.engine)

    return region


def run(layer: PackedLayer, region: Callable[..., Tensor], inputs: LayerInputs) -> Tensor:
    """Output after forward and backward."""
    layer.engine.install(inputs.schedule)
    with layer.router.answered_by(layer.engine):
        with torch.autocast(layer.setup.device.type, torch.bfloat16):
            out = region(*inputs.arguments)
        out.backward(inputs.dout)
    layer.drop_gradients(inputs)
    return out.detach()


def deviation(
    layer: PackedLayer, compiled: Callable[..., Tensor], eager: Callable[..., Tensor], inputs: LayerInputs
) -> float:
    return l2_error(run(layer, compiled, inputs), run(layer, eager, inputs).double())
