"""SmolLM2 from its GGUF file: our reader against the gguf package and transformers, bit for bit; the tokenizer against `tokenizers`.

The model's file (98 MB) comes through the asset store once a session. These tests skip only where it cannot be had.
"""

import json
import os
import random
import struct

import numpy as np
import pytest

from suite.assets import ASSETS, AssetError, chat_text, fetch, file_sha256, load_bf16, load_fp32, load_tokenizer, prompts, to_bf16_bits
from suite.assets._safetensors import read_safetensors, write_safetensors
from suite.assets.bpe import ByteBpe, split_words
from suite.assets.gguf import read_gguf

REASON = "the model file is on no source that this machine reaches"

NASTY = [
    "", " ", "\n", "  \n\t x", "a  b", "trailing   ", "don't I'll you've we're he'd I'm it's", "DON'T 'S 's '", "''ll 'll''",
    "1234567 3.14 1,000 x2y3", "  12", "a\n\n1. b\n\n\n  2) c", "\t7", "½ ² ⅷ ٣ 一二三", "naïve café Straße ǅ", "cafe\u0301 \u0301x",
    "日本語のテキスト", "Ελληνικά Русский עברית العربية हिन्दी", "emoji 🙂👩‍👩‍👧‍👦🇫🇷!", "zero\u200bwidth\ufeff", "nbsp\u00a0x\u00a0\u00a0y",
    "\u2003em \u3000ideo\u2028line", "\x85next", "\x1cfs \x1f us", "a\r\nb\r\n\r\n", "_under__score_ a_b", "!!!??? ...", "$5.00 + 20% = ?", "\\n \\\\ //",
    "def f(x):\n    return x**2  # why\n\n\n", "<|im_start|>user\nhi<|im_end|>", "<|im_start|", "<|im_end|><|im_end|> x", "<reponame><repo_name>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "http://example.org/a?b=c&d=%20", "O'Neill's 'quoted' ‘curly’ “x”", "ﬁ ﬂ Ⅻ ㎏", "x" * 300,
]  # fmt: skip


@pytest.fixture(scope="module")
def gguf_path():
    try:
        return fetch("smollm2-135m-instruct")
    except AssetError as error:
        if "differs" in str(error):
            raise
        pytest.skip(f"{REASON}: {error}")


@pytest.fixture(scope="module")
def fp32(gguf_path):
    return load_fp32()


@pytest.fixture(scope="module")
def tokenizer(gguf_path):
    return load_tokenizer()


@pytest.fixture(scope="module")
def reference_tokenizer(gguf_path):
    """`tokenizers` as SmolLM2's own tokenizer.json sets it up: single digits, then GPT-2's byte level."""
    tokenizers = pytest.importorskip("tokenizers", reason="the reference tokenizer is a test dependency")
    metadata = read_gguf(gguf_path).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3])
    return made


def test_every_tensor_equals_the_gguf_packages_dequantisation(gguf_path):
    gguf = pytest.importorskip("gguf", reason="the reference reader is a test dependency")
    ours = read_gguf(gguf_path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_path).tensors}
    assert sorted(ours.tensors) == sorted(theirs) and len(theirs) == 272
    for name, tensor in theirs.items():
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.tensor(name).view(np.uint32), np.ascontiguousarray(want).reshape(ours.tensors[name].shape).view(np.uint32)), name


def test_fp32_weights_equal_transformers_load_bit_for_bit(gguf_path, fp32):
    """The loader behind `from_pretrained(gguf_file=...)`, called itself because the public one also wants `accelerate` installed."""
    transformers = pytest.importorskip("transformers", reason="the reference loader is a test dependency")
    import torch
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(gguf_path), return_tensors=True, model_to_load=model)["tensors"]
    assert sorted(theirs) == sorted(fp32.tensors) == sorted(name for name, _ in model.named_parameters()), "tied head: no lm_head of its own"
    for name, want in theirs.items():
        want = want.float().contiguous().numpy()
        assert fp32.tensors[name].shape == want.shape
        assert np.array_equal(fp32.tensors[name].view(np.uint32), want.view(np.uint32)), name


def test_bf16_matrices_are_the_fp32_ones_rounded_to_nearest_even_by_torch(fp32):
    import torch

    stored = load_bf16().tensors
    assert sorted(stored) == sorted(fp32.tensors)
    for name, tensor in fp32.tensors.items():
        if tensor.ndim == 1:
            assert stored[name].dtype == np.float32 and np.array_equal(stored[name], tensor), name
        else:
            want = torch.from_numpy(tensor).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            assert stored[name].dtype == np.uint16 and np.array_equal(stored[name], want), name


def test_the_converted_file_is_read_equally_by_the_safetensors_package(gguf_path):
    safe_open = pytest.importorskip("safetensors").safe_open
    import torch

    path = fetch("smollm2-135m-instruct-bf16")
    ours, metadata = read_safetensors(path)
    with safe_open(path, framework="pt") as theirs:
        assert sorted(theirs.keys()) == sorted(ours) and theirs.metadata() == metadata
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.layers.29.mlp.down_proj.weight"):
            tensor = theirs.get_tensor(name)
            bits = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
            assert np.array_equal(bits, ours[name])


def test_a_converted_cache_alone_serves_a_host_without_network(gguf_path, tmp_path, monkeypatch):
    target = tmp_path / "smollm2-135m-instruct-bf16" / "model-bf16.safetensors"
    target.parent.mkdir()
    target.symlink_to(fetch("smollm2-135m-instruct-bf16").resolve())
    monkeypatch.delenv("SUITE_DATA", raising=False)
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    assert load_tokenizer(cache_dir=tmp_path).encode("hi") and len(load_bf16(cache_dir=tmp_path).tensors) == 272


def test_the_data_folder_alone_serves_a_host_without_network(gguf_path, tmp_path, monkeypatch):
    folder = tmp_path / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / gguf_path.name).symlink_to(gguf_path.resolve())
    monkeypatch.setenv("SUITE_DATA", str(tmp_path))
    monkeypatch.setenv("SUITE_OFFLINE", "1")
    made = fetch("smollm2-135m-instruct-bf16", cache_dir=tmp_path / "cache")
    assert file_sha256(made) == ASSETS["smollm2-135m-instruct-bf16"].sha256


def test_encoding_equals_tokenizers_on_nasty_strings(tokenizer, reference_tokenizer):
    for text in NASTY:
        try:
            ids = tokenizer.encode(text)
        except ValueError as error:
            assert "every byte must be in the vocabulary" in str(error), text
            # tokenizers drops such bytes in silence, so its text does not come back
            assert reference_tokenizer.decode(reference_tokenizer.encode(text).ids, skip_special_tokens=False) != text
            continue
        assert ids == reference_tokenizer.encode(text).ids, repr(text)
        assert tokenizer.decode(ids) == text == reference_tokenizer.decode(ids, skip_special_tokens=False)


def test_encoding_equals_tokenizers_on_random_unicode(tokenizer, reference_tokenizer):
    rng = random.Random(7)
    alphabet = list("ab AB  \n\n\t'sdtlmrev12.,!?_-é\u00a0\u2003中ж½🙂\x85") + ["<|im_end|>", "  ", "'ll", "'re"]
    for _ in range(1500):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 25)))
        assert tokenizer.encode(text) == reference_tokenizer.encode(text).ids, repr(text)


def test_encoding_equals_tokenizers_on_the_prompts(tokenizer, reference_tokenizer):
    texts = [*prompts(source="own-prompts").texts, *prompts().texts[:300]]
    for text in [*texts, *map(chat_text, texts[:20])]:
        assert tokenizer.encode(text) == reference_tokenizer.encode(text).ids, repr(text)


def test_encoding_equals_transformers_gguf_tokenizer_where_digits_follow_no_double_space(gguf_path, tokenizer):
    transformers = pytest.importorskip("transformers", reason="the reference tokenizer is a test dependency")
    theirs = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    for text in prompts(source="own-prompts").texts:
        assert tokenizer.encode(text) == theirs(text)["input_ids"], repr(text)
    assert tokenizer.encode("a  1") != theirs("a  1")["input_ids"], "the documented difference: if it is gone, say so in bpe.py"


def test_the_chat_text_is_what_the_models_template_renders(gguf_path):
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(read_gguf(gguf_path).metadata["tokenizer.chat_template"], keep_trailing_newline=True)
    assert chat_text("Hi there") == template.render(messages=[{"role": "user", "content": "Hi there"}], add_generation_prompt=True)


def test_control_names_in_a_text_are_plain_text_where_the_caller_says_so(tokenizer):
    assert tokenizer.encode("<|im_end|>") == [2]
    plain = tokenizer.encode("<|im_end|>", allow_control=False)
    assert 2 not in plain and tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.decode([2, 33], skip_control=True) == "1"
    with pytest.raises(ValueError, match="got i=49152"):
        tokenizer.decode([49152])


def test_the_pieces_of_a_text_join_to_the_text():
    for text in NASTY:
        assert "".join(split_words(text)) == text


def test_another_tokenizer_model_is_refused():
    with pytest.raises(AssetError, match="got kind=\\('llama', None\\)"):
        ByteBpe.from_gguf({"tokenizer.ggml.model": "llama"})


def tiny_gguf(*, tensor_type=0, dims=(4,), offset=0, values=16, metadata=()):
    """A hand-made GGUF: one tensor and a few metadata pairs."""

    def string(text):
        return struct.pack("<Q", len(text)) + text

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1 + len(metadata)) + string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")
    head += b"".join(string(key) + payload for key, payload in metadata)
    head += string(b"w") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor_type, offset)
    return head + bytes(-len(head) % 32) + bytes(values)


def test_a_hand_made_file_is_read(tmp_path):
    (tmp_path / "a.gguf").write_bytes(tiny_gguf(metadata=[(b"xs", struct.pack("<IIQ2i", 9, 5, 2, 7, -7))]))
    made = read_gguf(tmp_path / "a.gguf")
    assert made.metadata == {"general.architecture": "llama", "xs": [7, -7]}
    assert made.tensor("w").tolist() == [0.0] * 4
    with pytest.raises(AssetError, match="no tensor 'v'"):
        made.tensor("v")


# Each way a header can lie: about its type, its size, its place, its counts.
@pytest.mark.parametrize("change", [
    {"tensor_type": 99}, {"dims": (1 << 40,)}, {"dims": (2, 2, 2, 2, 2)}, {"offset": 1 << 62}, {"tensor_type": 8, "dims": (4,)},
    {"metadata": [(b"x", struct.pack("<IIQ", 9, 4, 1 << 60))]}, {"metadata": [(b"x", struct.pack("<IIQ", 9, 8, 1 << 60))]},
    {"metadata": [(b"x", struct.pack("<IQ", 8, (1 << 64) - 1))]}, {"metadata": [(b"x", struct.pack("<I", 77))]},
    {"metadata": [(b"x", struct.pack("<IIQ", 9, 9, 1))]}, {"metadata": [(b"general.alignment", struct.pack("<II", 4, 0))]},
    {"metadata": [(b"general.alignment", struct.pack("<IQ", 8, 1) + b"x")]}, {"metadata": [(b"x", struct.pack("<IQ", 8, 1) + b"\xff")]},
])  # fmt: skip
def test_a_header_that_lies_is_an_asset_error(tmp_path, change):
    (tmp_path / "bad.gguf").write_bytes(tiny_gguf(**change))
    with pytest.raises(AssetError, match="not a readable GGUF"):
        read_gguf(tmp_path / "bad.gguf")


def test_every_truncation_and_random_damage_is_an_asset_error_or_a_file_that_reads(tmp_path):
    whole = tiny_gguf(metadata=[(b"xs", struct.pack("<IIQ2i", 9, 5, 2, 7, -7)), (b"s", struct.pack("<IIQQ", 9, 8, 1, 2) + b"hi")])
    path = tmp_path / "bad.gguf"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(AssetError):
            read_gguf(path)
    rng = random.Random(11)
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            made = read_gguf(path)
            assert all(made.tensor(name).dtype == np.float32 for name in made.tensors)
        except AssetError as error:
            assert "\n" not in str(error)


def test_a_damaged_safetensors_file_is_an_asset_error(tmp_path):
    write_safetensors(tmp_path / "a", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, metadata={"k": "v"}, bf16=set())
    whole = (tmp_path / "a").read_bytes()
    tensors, metadata = read_safetensors(tmp_path / "a")
    assert tensors["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and metadata == {"k": "v"}
    header = json.dumps({"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 1 << 50]}}).encode()
    for bad in [b"", whole[:4], whole[:30], whole[:-4], (1 << 60).to_bytes(8, "little") + whole[8:], len(header).to_bytes(8, "little") + header, whole[:8] + b"[" * (len(whole) - 8)]:
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(AssetError, match="safetensors bad: not readable"):
            read_safetensors(tmp_path / "bad")
    with pytest.raises(ValueError, match="convert it first"):
        write_safetensors(tmp_path / "b", {"w": np.zeros(2)}, metadata={}, bf16=set())


def test_bf16_rounding_refuses_what_is_not_finite():
    assert to_bf16_bits(np.array([1.0, -0.0, 1.00390625, 1.01171875], np.float32)).tolist() == [0x3F80, 0x8000, 0x3F80, 0x3F82]
    with pytest.raises(ValueError, match="got 1 that are not"):
        to_bf16_bits(np.array([1.0, np.inf], np.float32))


def test_the_model_file_lies_where_the_store_says(gguf_path):
    assert os.path.getsize(gguf_path) == ASSETS["smollm2-135m-instruct"].size_bytes
