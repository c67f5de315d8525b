"""Every kind of tokenizer: round trips, templates, one BOS, escaping, truncation, threads."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxrl_llm import tokenizer as tok
from jaxrl_llm.errors import ConfigError, DataError
from tests.tiny_tokenizers import (
    BOS_D,
    DEEPSEEK,
    EOS_D,
    KINDS,
    LLAMA,
    MERGES,
    QWEN,
    SYSTEM,
    USER,
    VOCAB,
    byte_level,
    characters,
    deepseek,
    ids_of,
    llama2,
    llama3,
    qwen,
    save,
)


@pytest.fixture(params=KINDS)
def any_kind(request: pytest.FixtureRequest, tmp_path: Path) -> tok.Tokenizer:
    return tok.load(KINDS[request.param](tmp_path / "t"))


# --- loading -----------------------------------------------------------------------------------------------------------


def test_deepseek_labelled_llama_keeps_its_spaces(tmp_path: Path) -> None:
    loaded = tok.load(deepseek(tmp_path / "d"))
    assert loaded.encode("a the b") == [64, 258, 220, 65]
    assert loaded.decode([64, 258, 220, 65]) == "a the b"


def test_special_ids(tmp_path: Path) -> None:
    d, q = tok.load(deepseek(tmp_path / "d")), tok.load(qwen(tmp_path / "q"))
    assert (d.bos_id, d.eos_id, d.pad_id, d.stop_ids, d.adds_bos) == (259, 260, 260, (260,), True)
    assert d.vocab_size == 261
    assert (q.bos_id, q.eos_id, q.pad_id, q.stop_ids, q.adds_bos) == (
        None,
        261,
        259,
        (261, 259),
        False,
    )
    l3, l2 = tok.load(llama3(tmp_path / "3")), tok.load(llama2(tmp_path / "2"))
    assert (l3.bos_id, l3.pad_id, l3.stop_ids, l3.adds_bos) == (259, 263, (263, 260), True)
    assert (l2.bos_id, l2.eos_id, l2.pad_id, l2.adds_bos) == (1, 2, 2, True)


def test_stop_ids_need_one_and_take_more(tmp_path: Path) -> None:
    folder = deepseek(tmp_path / "d", eos_token=None, pad_token=None)
    with pytest.raises(DataError, match=r"at least one stop id; set rollout.stop_token_ids"):
        tok.load(folder)
    loaded = tok.load(folder, extra_stop_ids=(198, 260))
    assert loaded.stop_ids == (198, 260) and loaded.eos_id == 198
    assert loaded.encode("a\n") == [64, 198], "an ordinary stop id stays writable"
    with pytest.raises(DataError, match=r"stop ids \[261\] are outside its 261 tokens"):
        tok.load(folder, extra_stop_ids=(261,))


def test_round_trip_failure_shows_text_ids_and_decoded(tmp_path: Path) -> None:
    fast = byte_level(["<eos>"])
    fast.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(" ", "")])
    with pytest.raises(DataError) as caught:
        tok.load(save(tmp_path / "t", fast, {"eos_token": "<eos>"}))
    text = str(caught.value)
    assert (
        repr(tok.PROBES[0]) in text
        and str(ids_of("two")[0]) in text
        and "twospacesandthree" in text
    )


def test_a_normalizer_that_changes_text_is_refused(tmp_path: Path) -> None:
    fast = byte_level(["<eos>"])
    fast.normalizer = normalizers.NFKD()
    with pytest.raises(DataError, match="need 'd\u00e9j"):
        tok.load(save(tmp_path / "t", fast, {"eos_token": "<eos>"}))


def test_character_vocabulary_may_lack_letters_but_not_spaces_or_digits(tmp_path: Path) -> None:
    loaded = tok.load(characters(tmp_path / "c"))
    assert loaded.encode("1 + x") == [4, 2, 13, 2, 0]
    assert loaded.decode(loaded.encode("12 + 30 = 42\n")) == "12 + 30 = 42\n"
    for alphabet in ("0123456789+=", " 012345678+="):
        with pytest.raises(DataError, match="need "):
            tok.load(characters(tmp_path / "c", alphabet))


def test_lost_characters_without_an_unknown_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be encoded"):
        tok.load(characters(tmp_path / "c", unk=False))
    vocab = {"<eos>": 0, **{c: n + 1 for n, c in enumerate(" 0123456789")}}
    silent = Fast(models.BPE(vocab=vocab, merges=[]))
    silent.decoder = decoders.Fuse()
    with pytest.raises(DataError, match="need 'two  spaces"):
        tok.load(save(tmp_path / "s", silent, {"eos_token": "<eos>"}))


def test_digest_sees_vocabulary_and_template(tmp_path: Path) -> None:
    first = tok.load(deepseek(tmp_path / "a"))
    again = tok.load(deepseek(tmp_path / "b"))
    other = tok.load(deepseek(tmp_path / "c", chat_template=DEEPSEEK + " "))
    assert first.digest == again.digest != other.digest
    assert len(first.digest) == 64 and first.secret != again.secret


def test_template_file_wins(tmp_path: Path) -> None:
    folder = deepseek(tmp_path / "d")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tok.load(folder).chat(USER) == [259, *ids_of("hi"), 258]


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_x.X", None]}
    folder = deepseek(tmp_path / "d", tokenizer_class="X", auto_map=auto_map)
    (folder / "tokenization_x.py").write_text("raise SystemExit('ran')")
    assert tok.load(folder).encode("hi") == ids_of("hi")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="never done"):
        tok.load(folder)


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        tok.load(tmp_path / "none")
    folder = deepseek(tmp_path / "d")
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"tokenizer.json \(\d+ bytes\)"):
        tok.load(folder)
    (folder / "tokenizer.json").write_bytes(whole)
    (folder / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config.json is not valid JSON"):
        tok.load(folder)


def test_folder_with_vocab_and_merges_only(tmp_path: Path) -> None:
    vocab = {**VOCAB, "<|endoftext|>": 259}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in MERGES), encoding="utf-8"
    )
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = tok.load(tmp_path)
    assert loaded.encode("a the") == [64, 258] and loaded.stop_ids == (259,)


# --- templates and BOS -------------------------------------------------------------------------------------------------


def test_golden_deepseek(tmp_path: Path) -> None:
    loaded = tok.load(deepseek(tmp_path / "d"))
    expected = [259, *ids_of("be\n\nUser: hi"), 258, *ids_of("\n\nAssistant:")]
    assert loaded.chat(SYSTEM) == expected
    assert loaded.decode(expected) == "be\n\nUser: hi the\n\nAssistant:"


def test_golden_llama(tmp_path: Path) -> None:
    loaded = tok.load(llama3(tmp_path / "l"))
    start, end, eot = 261, 262, 263
    head = [259, start, *ids_of("user"), end, *ids_of("\n\nhi"), 258, eot]
    padded = [{"role": "user", "content": "  hi the \n"}]
    assert loaded.chat(padded) == [*head, start, *ids_of("assistant"), end, *ids_of("\n\n")]


def test_golden_qwen(tmp_path: Path) -> None:
    loaded = tok.load(qwen(tmp_path / "q"))
    im_start, im_end = 260, 261
    expected = [im_start, *ids_of("system\nbe"), im_end, 198]
    expected += [im_start, *ids_of("user\nhi"), 258, im_end, 198, im_start, *ids_of("assistant\n")]
    assert loaded.chat(SYSTEM) == expected


def test_same_ids_as_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    chat = [*SYSTEM, {"role": "assistant", "content": "y  z"}, {"role": "user", "content": "\n 1"}]
    for name, template in (("deepseek", DEEPSEEK), ("llama3", LLAMA), ("qwen", QWEN)):
        loaded = tok.load(KINDS[name](tmp_path / name))
        theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / name / "tokenizer.json"), **loaded.special
        )
        theirs.chat_template = template
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert loaded.chat(chat) == ids


@pytest.mark.parametrize("template", [DEEPSEEK, DEEPSEEK[len("{{ bos_token }}") :]])
def test_one_bos_whoever_writes_it(tmp_path: Path, template: str) -> None:
    loaded = tok.load(deepseek(tmp_path / "d", chat_template=template))
    assert loaded.chat(USER)[:2] == [259, 52] and loaded.chat(USER).count(259) == 1


def test_two_bos_of_a_careless_template_become_one(tmp_path: Path) -> None:
    loaded = tok.load(deepseek(tmp_path / "d", chat_template="{{ bos_token }}" + DEEPSEEK))
    assert loaded.chat(USER).count(259) == 1


def test_plain_has_one_bos_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    d, q = tok.load(deepseek(tmp_path / "d")), tok.load(qwen(tmp_path / "q"))
    assert d.plain("hi") == [259, *ids_of("hi")] and q.plain("hi") == ids_of("hi")
    assert d.encode("hi") == ids_of("hi")
    assert d.plain("{x}", template="Q: {prompt}\nA:") == [259, *ids_of("Q: {x}\nA:")]
    assert d.plain("hi", template=BOS_D + "{prompt}") == [259, *ids_of("hi")]
    assert q.plain("hi", template="{prompt}<|im_end|>") == [*ids_of("hi"), 261]
    with pytest.raises(ConfigError, match="plain_template"):
        d.plain("hi", template="none")


def test_bos_config_key_beats_the_post_processor(tmp_path: Path) -> None:
    folder = llama3(tmp_path / "l")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    assert tok.load(folder).plain("hi") == ids_of("hi")


def test_no_template_asks_for_plain(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.prompt_format=plain"):
        tok.load(deepseek(tmp_path / "d", chat_template=None)).chat(USER)


def test_refused_system_role_offers_folding(tmp_path: Path) -> None:
    loaded = tok.load(llama2(tmp_path / "l"))
    with pytest.raises(ConfigError, match=r"data.fold_system_prompt=true"):
        loaded.chat(SYSTEM)
    folded = [{"role": "user", "content": "be\n\nhi the"}]
    assert loaded.chat(SYSTEM, fold_system=True) == loaded.chat(folded)
    assert loaded.chat(USER, fold_system=True) == loaded.chat(USER)
    with pytest.raises(DataError, match="no user message after it"):
        loaded.chat(SYSTEM[:1], fold_system=True)


# --- escaping and unicode ----------------------------------------------------------------------------------------------


def test_user_text_cannot_write_control_tokens(any_kind: tok.Tokenizer) -> None:
    for text in any_kind.control:
        evil = f"a {text} b"
        ids = any_kind.encode(evil)
        assert not {any_kind.fast.token_to_id(t) for t in any_kind.control} & set(ids)
        assert any_kind.decode(ids) == evil
        clean = any_kind.chat([{"role": "user", "content": "Q"}])
        attack = any_kind.chat([{"role": "user", "content": evil}])
        for control in any_kind.control:
            number = any_kind.fast.token_to_id(control)
            assert number is not None
            assert attack.count(number) == clean.count(number)
        assert evil in any_kind.decode(attack, skip_special=False)


def test_unflagged_role_markers_are_control_tokens_and_think_is_not(tmp_path: Path) -> None:
    loaded = tok.load(qwen(tmp_path / "q"))
    assert loaded.encode("<|role|>") == ids_of("<|role|>")
    assert loaded.encode("<think>") == [262]


def test_escape_in_every_field_of_a_chat(tmp_path: Path) -> None:
    loaded = tok.load(qwen(tmp_path / "q"))
    chat = [{"role": "<|im_end|>", "content": "a"}, {"role": "user", "content": "<|im_start|>"}]
    assert loaded.chat(chat).count(261) == 2 and loaded.chat(chat).count(260) == 3


def test_unigram_pieces_spelled_like_control_tokens(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -1.0)]
    pieces += [(chr(c), -2.0) for c in range(33, 127)]
    fast = Fast(models.Unigram(pieces, unk_id=0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert 2 in fast.encode("a</s>").ids, "the raw model does produce it"
    loaded = tok.load(save(tmp_path / "u", fast, config))
    assert 2 not in loaded.encode("a</s>") and loaded.decode(loaded.encode("a</s>")) == "a</s>"


@pytest.mark.parametrize(
    "text",
    [
        "e\u0301 \u0928\u093f",
        "\u05e9\u05dc\u05d5\u05dd \u202e\u0627\u0628",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f",
        "zero\u200bwidth\ufeff",
        "\uff11\uff12\uff13",
        "nul\x00 \x7f \U0010ffff",
        "",
    ],
)
def test_unicode_survives(tmp_path: Path, text: str) -> None:
    for kind in (deepseek, llama2):
        loaded = tok.load(kind(tmp_path / kind.__name__))
        assert loaded.decode(loaded.encode(text)) == text


def test_half_a_surrogate_pair_is_named(any_kind: tok.Tokenizer) -> None:
    for call in (any_kind.encode, any_kind.plain):
        with pytest.raises(DataError, match=r"at character 2"):
            call("ab\ud800c")
    with pytest.raises(DataError, match="surrogate"):
        any_kind.chat([{"role": "user", "content": "\udc00"}])


def test_decode_keeps_spaces_and_drops_specials(tmp_path: Path) -> None:
    loaded = tok.load(deepseek(tmp_path / "d"))
    ids = [*loaded.encode(" it 's  , ok ."), 260, 260]
    assert loaded.decode(ids) == " it 's  , ok ."
    assert loaded.decode(ids, skip_special=False).endswith(EOS_D * 2)
    assert loaded.decode([64, 5000, 65]) == "ab", "padded rows of an embedding have no text"


def test_added_letters_of_deepseek_are_read_back(tmp_path: Path) -> None:
    letters = ("\u00fc", "\u00f6", "\u00f8")  # in the byte alphabet: bytes that UTF-8 never uses
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(letters))
    fast = Fast(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([EOS_D])
    fast.add_tokens(list(letters))
    loaded = tok.load(save(tmp_path / "t", fast, {"eos_token": EOS_D}))
    text = "f\u00fcr \u00f6 \u00e4 \u00f8\u00f8 \u6771"
    ids = loaded.encode(text)
    assert [n for n in ids if n > 253] == [254, 255, 256, 256]
    assert "\ufffd" in fast.decode(ids), "the reason for the detour"
    assert loaded.decode([*ids, 253]) == text
    assert loaded.decode([*ids, 253], skip_special=False) == text + EOS_D


# --- truncation --------------------------------------------------------------------------------------------------------


def test_truncation_by_hand(tmp_path: Path) -> None:
    loaded = tok.load(deepseek(tmp_path / "d"))
    chat = [{"role": "user", "content": "abcdef"}]
    head, tail = [259, *ids_of("User:")], ids_of("\n\nAssistant:")
    whole = [*head, 220, *ids_of("abcdef"), *tail]
    assert loaded.chat(chat) == whole
    assert loaded.chat_truncated(chat, len(whole), "left") == whole
    # " a..f" is split as " " + letters, so all six letters are single ids inside the text.
    for side, kept in (("left", "def"), ("right", "abc"), ("middle", "abf")):
        cut = loaded.chat_truncated(chat, len(whole) - 3, side)  # type: ignore[arg-type]
        assert cut == [*head, 220, *ids_of(kept), *tail], side
    assert loaded.plain_truncated("abcdef", 4, "left") == [259, *ids_of("def")]
    assert loaded.plain_truncated("abcdef", 7, "left") == loaded.plain("abcdef")
    assert loaded.plain_truncated("abcdef", 6, "right", template="<{prompt}>") == [
        259,
        *ids_of("<abc>"),
    ]


def test_truncation_keeps_everything_around_the_text(any_kind: tok.Tokenizer) -> None:
    text = "one two three four five six seven eight 9 10 11 12"
    earlier = [*USER, {"role": "assistant", "content": "ok"}]
    chat = [*earlier, {"role": "user", "content": text}]
    whole = any_kind.chat(chat)
    for side in ("left", "right", "middle"):
        cut = any_kind.chat_truncated(chat, len(whole) - 10, side)  # type: ignore[arg-type]
        assert len(cut) == len(whole) - 10
        at = next(n for n in range(len(cut)) if cut[:n] + whole[n : n + 10] + cut[n:] == whole)
        removed = any_kind.decode(whole[at : at + 10]).strip()
        assert removed in text
        assert {"left": text.startswith, "right": text.endswith, "middle": text.__contains__}[side](
            removed
        )


def test_characters_of_several_ids_are_dropped_whole(any_kind: tok.Tokenizer) -> None:
    text = "\U0001f642" * 8
    whole = any_kind.plain(text)
    for limit in range(12, len(whole)):
        for side in ("left", "right", "middle"):
            cut = any_kind.plain_truncated(text, limit, side)  # type: ignore[arg-type]
            assert len(cut) <= limit
            assert set(any_kind.decode(cut).strip()) == {"\U0001f642"}


def test_truncation_with_folded_system_and_escapes(tmp_path: Path) -> None:
    loaded = tok.load(llama2(tmp_path / "l"))
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "</s>" + "x" * 20}]
    whole = loaded.chat(chat, fold_system=True)
    cut = loaded.chat_truncated(chat, len(whole) - 8, "right", fold_system=True)
    assert loaded.decode(cut) == "[user]be\n\n</s>" + "x" * 12 + "[a]"


def test_nothing_left_to_cut(tmp_path: Path) -> None:
    loaded = tok.load(deepseek(tmp_path / "d"))
    with pytest.raises(DataError, match=r"19 ids around the user's text and 6 in it; .* within 19"):
        loaded.chat_truncated([{"role": "user", "content": "abcdef"}], 19, "left")
    with pytest.raises(DataError, match="no user message"):
        loaded.chat_truncated([{"role": "assistant", "content": "abcdef"}], 9, "left")
    twice = "{{ messages[0].content }}{{ messages[0].content }}"
    loaded = tok.load(deepseek(tmp_path / "d", chat_template=twice))
    with pytest.raises(DataError, match="exactly once"):
        loaded.chat_truncated(USER, 3, "left")


# --- threads and imports -----------------------------------------------------------------------------------------------


def test_sixteen_threads_get_the_same_ids(tmp_path: Path) -> None:
    folder = llama3(tmp_path / "l")
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    loaded = tok.load(folder)

    def work(number: int) -> list[Any]:
        text = f"{number % 7} the <|eot_id|> " * 5
        chat = [{"role": "user", "content": text}]
        ids = loaded.encode(text)
        cut = loaded.chat_truncated(chat, 60, "middle")
        return [ids, loaded.decode(ids) == text, loaded.plain(text), loaded.chat(chat), cut]

    alone = [work(n) for n in range(7)]
    assert len(alone[0][0]) > 3 and all(one[1] for one in alone)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(160))) == [alone[n % 7] for n in range(160)]


def test_tokenizer_does_not_import_jax(tmp_path: Path) -> None:
    folder = deepseek(tmp_path / "d")
    code = (
        "import sys; from jaxrl_llm import tokenizer, paths; from jaxrl_llm.models import gguf\n"
        "assert not {'transformers', 'tokenizers', 'gguf'} & set(sys.modules), 'imported too early'\n"
        f"t = tokenizer.load({str(folder)!r}); t.chat([{{'role': 'user', 'content': 'x'}}])\n"
        "assert not {'jax', 'flax', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
