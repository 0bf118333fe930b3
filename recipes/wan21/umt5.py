"""The text encoder of Wan2.1, UMT5-XXL from transformers, behind the interface of a text encoder."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.text import HashedTextEncoder, TextEncoder
from zellige_lightning.recipes.wan21.vae import subfolder_of, weights_digest

TEXT_LEN = 512  # rows that Wan2.1 was trained with


def cleaned(caption: str) -> str:
    """As the original cleans prompts: broken encodings and HTML entities repaired, white space collapsed."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return " ".join(text.split())


class Umt5Encoder:
    """Last hidden states of the caption's own tokens, then zeros.

    UMT5 answers paddings with values that are not zero, and Wan2.1 was trained on zeros there. So the caption
    is encoded without padding, cut after `text_len` tokens, and filled up with zeros.

    Args:
        tokenizer, model: of transformers.
        text_len: rows, padding included.

    Raises:
        ConfigError: the tokenizer has tokens that the model does not.
    """

    def __init__(self, tokenizer: Any, model: Any, text_len: int = TEXT_LEN) -> None:
        if len(tokenizer) > model.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {len(tokenizer)} tokens, the text encoder {model.config.vocab_size}",
                fix="use the tokenizer that was published with the text encoder",
            )
        self.tokenizer, self.model = tokenizer, model.eval().requires_grad_(False)
        self.text_len, self._digest = text_len, weights_digest(model)

    @property
    def text_dim(self) -> int:
        return int(self.model.config.d_model)

    @property
    def settings(self) -> Mapping[str, str | int]:
        return {
            "encoder": "umt5-trimmed-1",
            "encoder_weights": self._digest,
            "encoder_dtype": str(self.model.dtype),
            "text_len": self.text_len,
            "text_dim": self.text_dim,
        }

    @torch.no_grad()
    def encode(self, caption: str) -> Tensor:
        """See `TextEncoder.encode`. A longer caption is cut to `text_len` tokens, the end token included."""
        out = torch.zeros(self.text_len, self.text_dim)
        text = cleaned(caption)
        if not text:
            return out
        tokens = self.tokenizer(text, max_length=self.text_len, truncation=True, return_tensors="pt")
        ids = tokens["input_ids"].to(self.model.device)
        mask = torch.ones_like(ids)
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state[0]
        out[: states.shape[0]] = states.float().cpu()
        return out


def load_text_encoder(
    name: str, device: torch.device, dtype: torch.dtype, text_len: int | None
) -> TextEncoder:
    """`demo`, or UMT5 in a local folder (`tokenizer` and `text_encoder` in it), or on the Hugging Face hub.

    Only safetensors are read, and no code that comes with weights is run.

    Args:
        text_len: rows; None for 512, or 16 for the demo's.

    Raises:
        ConfigError: nothing there that can be loaded.
    """
    if name == "demo":
        return HashedTextEncoder(text_len or 16)
    from transformers import AutoTokenizer, UMT5EncoderModel

    encoder, tokenizer = subfolder_of(name, "text_encoder"), subfolder_of(name, "tokenizer")
    try:
        model = UMT5EncoderModel.from_pretrained(name, subfolder=encoder, use_safetensors=True, dtype=dtype)
        words = AutoTokenizer.from_pretrained(name, subfolder=tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no text encoder could be loaded from {name!r}: {str(error).splitlines()[0]}",
            fix="give `demo`, a folder with text_encoder and tokenizer, or a hub name such as"
            " Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        ) from error
    return Umt5Encoder(words, model.to(device), text_len or TEXT_LEN)
