"""Tokenizers: against `transformers` on the same folder."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from rlhf_dsl.diagnostics import DiagnosticError
from runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]

TEXTS = ["12+30=", "", " a  b\n", "~!é", "x</s>y"]
TEMPLATE = ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant] {% endif %}")


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """The tokenizer that the built-in models have."""
    file = Path(__file__).parent.parent / "programs/models/make_tokenizer.py"
    spec = importlib.util.spec_from_file_location("make_tokenizer", file)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    folder = tmp_path_factory.mktemp("characters")
    made.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A byte-level BPE with a chat template, no BOS, and two end tokens, as Qwen2 has."""
    folder = tmp_path_factory.mktemp("chat")
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>", "<stop>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None,
              "eos_token": {"__type": "AddedToken", "content": "<stop>"},
              "chat_template": TEMPLATE.replace("{{ bos_token }}", "")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    return folder


def reference(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", ["characters", "chat"])
def test_equals_transformers(name, request):
    folder = request.getfixturevalue(name)
    ours, theirs = Tokenizer(folder), reference(folder)
    assert (ours.bos, ours.eos, ours.size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_response(text, 99) == (ids + [theirs.eos_token_id], False)
        assert ours.decode(ids + [theirs.eos_token_id]) == theirs.decode(ids, skip_special_tokens=True)
        if theirs.chat_template:
            message = [{"role": "user", "content": text}]
            rendered = theirs.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            want = theirs(rendered, add_special_tokens=False)["input_ids"]
        else:
            want = theirs(text)["input_ids"]
        assert ours.encode_prompt(text) == want


def test_bound(characters):
    tokenizer = Tokenizer(characters)
    a = tokenizer.encode_response("abc", 4)
    assert a == (a[0], False) and len(a[0]) == 4 and a[0][-1] == tokenizer.eos
    assert tokenizer.encode_response("abc", 3) == (a[0][:3], True)
    assert tokenizer.encode_response("abc", 2) == (a[0][:2], True)
    assert tokenizer.encode_response("", 1) == ([tokenizer.eos], False)


def test_plain_text(characters, chat):
    with_bos, without = Tokenizer(characters), Tokenizer(chat)
    ids = with_bos.encode_response("abc", 9)[0]
    assert with_bos.encode_text("abc", 9) == ([with_bos.bos], ids, False)
    assert with_bos.encode_text("abc", 3) == ([with_bos.bos], ids[:3], True)
    ids = without.encode_response("xyz", 9)[0]
    assert without.encode_text("xyz", 3) == (ids[:1], ids[1:], False)
    assert without.encode_text("xyz", 2) == (ids[:1], ids[1:3], True)
    with pytest.raises(ValueError):
        without.encode_text("", 9)


def test_template_file_comes_first(chat, tmp_path):
    for file in chat.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("Q: {{ messages[0].content }} A:")
    assert Tokenizer(tmp_path).decode(Tokenizer(tmp_path).encode_prompt("hi")) == "Q: hi A:"
    assert reference(tmp_path).chat_template == Tokenizer(tmp_path).chat_template
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('system message wanted') }}")
    with pytest.raises(DiagnosticError, match="R0312.*system message wanted"):
        Tokenizer(tmp_path).encode_prompt("hi")


def test_end_tokens_and_identity(characters, chat):
    assert Tokenizer(characters).end_ids == (2,)
    assert Tokenizer(chat).end_ids == (1, 0)
    assert Tokenizer(chat).identity == Tokenizer(chat).identity != Tokenizer(characters).identity


def test_older_format_is_converted(characters, tmp_path):
    from transformers import GPT2Tokenizer

    letters = {c: i for i, c in enumerate(["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = Tokenizer(tmp_path)
    want = GPT2Tokenizer.from_pretrained(tmp_path)("abc", add_special_tokens=False)["input_ids"]
    assert tokenizer.encode_response("abc", 9) == (want + [0], False)


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": "{"}, {"tokenizer.json": "{}", "tokenizer_config.json": "["}])
def test_unreadable(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DiagnosticError, match="R0310"):
        Tokenizer(tmp_path)
    with pytest.raises(DiagnosticError, match="R0310"):
        Tokenizer(tmp_path / "none")


def test_a_template_makes_another_form_of_the_same_tokens(tmp_path):
    plain, chat = tmp_path / "plain", tmp_path / "chat"
    for folder in (plain, chat):
        shutil.copytree(ROOT / "programs" / "models" / "tiny", folder)
    (chat / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}!")
    assert Tokenizer(plain).identity == Tokenizer(chat).identity
    assert Tokenizer(plain).form != Tokenizer(chat).form


def test_a_truncated_response_that_is_read_again_does_not_end():
    from runtime.executor.reencoding import _again

    tokenizer = Tokenizer(ROOT / "programs" / "models" / "tiny")
    ended, cut = (_again(tokenizer, "1+1=", "23", truncated)[1] for truncated in (False, True))
    assert ended == [*cut, tokenizer.end_ids[0]] and len(cut) == 2
