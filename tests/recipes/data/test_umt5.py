"""UMT5 as a text encoder, with a tiny random model and a tokenizer built here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from tests.recipes.data.stores import sequence_of
from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.encode_cli import main
from zellige_lightning.recipes.wan21.encoded_store import EncodedStore
from zellige_lightning.recipes.wan21.text import HashedTextEncoder
from zellige_lightning.recipes.wan21.umt5 import TEXT_LEN, Umt5Encoder, cleaned, load_text_encoder

WORDS = ["<pad>", "</s>", "<unk>", "a", "dog", "cat", "runs", "fast", "&", "café"]
CPU = torch.device("cpu")


def make_umt5(folder: Path, vocab_size: int = 32, seed: int = 0) -> Path:
    """`text_encoder` and `tokenizer`, as pipelines keep them."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=vocab_size,
        d_model=24,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=3,
        pad_token_id=0,
        eos_token_id=1,
    )
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    return folder


@pytest.fixture(scope="module")
def umt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_umt5(tmp_path_factory.mktemp("umt5"))


@pytest.fixture(scope="module")
def encoder(umt5: Path) -> Umt5Encoder:
    encoder = load_text_encoder(str(umt5), CPU, torch.float32, None)
    assert isinstance(encoder, Umt5Encoder)
    return encoder


def test_the_own_tokens_then_exact_zeros(encoder: Umt5Encoder) -> None:
    out = encoder.encode("a dog runs")
    assert out.shape == (TEXT_LEN, 24) == (512, 24)
    assert bool((out[:4] != 0).any(dim=1).all())  # three words and the end token
    assert bool((out[4:] == 0).all())


def test_values_are_those_of_padded_and_masked_encoding(encoder: Umt5Encoder) -> None:
    """The original pads to 512, masks, and cuts the paddings off."""
    padded = encoder.tokenizer("a dog runs", padding="max_length", max_length=512, return_tensors="pt")
    with torch.no_grad():
        states = encoder.model(padded["input_ids"], padded["attention_mask"]).last_hidden_state[0]
    assert bool((states[4:] != 0).any())  # what must not be kept
    torch.testing.assert_close(encoder.encode("a dog runs")[:4], states[:4], rtol=1e-4, atol=1e-5)


def test_long_captions_are_cut_with_the_end_token(umt5: Path) -> None:
    encoder = load_text_encoder(str(umt5), CPU, torch.float32, 6)
    out = encoder.encode("a dog runs fast " * 50)
    assert out.shape == (6, 24)
    assert bool((out != 0).any(dim=1).all())
    assert torch.allclose(out, encoder.encode("a dog runs fast a"), atol=1e-6)  # five words and the end


def test_captions_are_cleaned_as_the_original_does(encoder: Umt5Encoder) -> None:
    assert cleaned("  a &amp;amp;\n dog ") == "a & dog"
    assert cleaned("cafÃ©") == "café"
    assert torch.equal(encoder.encode("a \n  dog"), encoder.encode("a dog"))
    assert bool((encoder.encode("  ") == 0).all())


def test_weights_and_lengths_are_part_of_the_identity(
    umt5: Path, tmp_path: Path, encoder: Umt5Encoder
) -> None:
    same = load_text_encoder(str(umt5), CPU, torch.float32, None)
    assert same.settings == encoder.settings
    other = load_text_encoder(str(make_umt5(tmp_path, seed=1)), CPU, torch.float32, None)
    assert other.settings["encoder_weights"] != encoder.settings["encoder_weights"]
    assert load_text_encoder(str(umt5), CPU, torch.float32, 6).settings["text_len"] == 6
    assert load_text_encoder("demo", CPU, torch.float32, None) == HashedTextEncoder(16)


def test_what_is_no_umt5(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no text encoder could be loaded"):
        load_text_encoder(str(tmp_path), CPU, torch.float32, None)
    make_umt5(tmp_path, vocab_size=5)
    with pytest.raises(ConfigError, match="the tokenizer has 10 tokens, the text encoder 5"):
        load_text_encoder(str(tmp_path), CPU, torch.float32, None)


def test_stores_keep_the_captions_own_rows_and_read_512(
    tmp_path: Path, images: Path, umt5: Path, encoder: Umt5Encoder, tiny_buckets: Path
) -> None:
    (images / "0.txt").write_text("a dog runs fast")
    (images / "1.txt").write_text("")
    options = ["--buckets", str(tiny_buckets), "--workers", "1", "--quiet", "--missing-caption", "empty"]
    main([str(images), "--output", str(tmp_path / "out"), "--text", str(umt5), *options])
    store = EncodedStore(tmp_path / "out")
    assert store.sequence_fields["text"].shape == (512, 24)
    text = store.read_sequence(sequence_of(store, "0.png"))["text"]
    assert torch.equal(text, encoder.encode("a dog runs fast").bfloat16())
    assert bool((store.read_sequence(sequence_of(store, "1.png"))["text"] == 0).all())
    (shard,) = (tmp_path / "out").glob("shard-*")
    assert shard.stat().st_size < 100_000  # 9 x 512 x 24 rows in full would be 221 kB
