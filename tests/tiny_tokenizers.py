"""Tokenizers of each kind, small enough to work out their ids by hand."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast

# Byte-level ids worked by hand: printable ASCII c -> ord(c) - 33, space (written G with a dot) -> 220, newline -> 198.
BYTES = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the")]
VOCAB = {**BYTES, "th": 256, "the": 257, "\u0120the": 258}

BOS_D, EOS_D = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[a]' }}{% endif %}"
)
USER = [{"role": "user", "content": "hi the"}]
SYSTEM = [{"role": "system", "content": "be"}, *USER]


def ids_of(text: str) -> list[int]:
    """Byte-level ids of printable ASCII without merges."""
    return [{" ": 220, "\n": 198}.get(c, ord(c) - 33) for c in text]


def byte_level(special: list[str], plain: tuple[str, ...] = ()) -> Fast:
    fast = Fast(models.BPE(vocab=dict(VOCAB), merges=list(MERGES)))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=True)
    fast.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    fast.add_tokens([AddedToken(t, normalized=False) for t in plain])
    return fast


def save(folder: Path, fast: Fast, settings: dict[str, Any], **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def deepseek(folder: Path, **extra: Any) -> Path:
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "bos_token": {"__type": "AddedToken", "content": BOS_D},
        "eos_token": {"__type": "AddedToken", "content": EOS_D},
        "pad_token": {"__type": "AddedToken", "content": EOS_D},
        "chat_template": DEEPSEEK,
    }
    return save(folder, byte_level([BOS_D, EOS_D]), config | extra)


def llama3(folder: Path) -> Path:
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    fast = byte_level([*names, "<|eot_id|>"])
    bos = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 259)]
    )
    fast.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    config = {"bos_token": names[0], "eos_token": "<|eot_id|>", "chat_template": LLAMA}
    return save(folder, fast, config, generation_config={"eos_token_id": [260, 263]})


def qwen(folder: Path) -> Path:
    fast = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ("<think>", "<|role|>"))
    fast.normalizer = normalizers.NFC()
    config = {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": QWEN}],
    }
    files = {"generation_config": {"eos_token_id": [261, 259]}, "config": {"eos_token_id": 259}}
    return save(folder, fast, config, **files)


def llama2(folder: Path, template: str = GEMMA) -> Path:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581"]
    pieces += [chr(c) for c in range(33, 127)] + ["th", "the", "\u2581the"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    fast = Fast(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    fast.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save(folder, fast, config | {"chat_template": template})


def characters(folder: Path, alphabet: str = " 0123456789+=\n", *, unk: bool = True) -> Path:
    vocab = {"<unk>": 0, "<eos>": 1, **{c: n + 2 for n, c in enumerate(alphabet)}}
    fast = Fast(models.WordLevel(vocab, unk_token="<unk>" if unk else "none"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(["<unk>", "<eos>"] if unk else ["<eos>"])
    return save(folder, fast, {"eos_token": "<eos>", "unk_token": "<unk>" if unk else None})


KINDS = {"deepseek": deepseek, "llama3": llama3, "qwen": qwen, "llama2": llama2}
