"""Text to tokens and back, by the tokenizer in a Hugging Face folder.

`tokenizer.json` is read by the `tokenizers` library alone, which starts in hundredths of a second; `transformers` is
imported only to render a chat template or to convert a folder that has no `tokenizer.json`.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from rlhf_dsl.diagnostics import DiagnosticError, fault

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a model folder.

    bos, eos: token ids or None
    chat_template: Jinja source or None
    Raises R0310 if the folder has no readable tokenizer.
    """

    def __init__(self, folder) -> None:
        self.folder = Path(folder)
        config = _read_json(self.folder / "tokenizer_config.json")
        self._backend, config = _load_backend(self.folder, config)
        self._backend.no_truncation()
        self._backend.no_padding()
        legacy = _read_json(self.folder / "special_tokens_map.json")
        self._special = {n: t for n in SPECIAL if (t := _content(config.get(n) or legacy.get(n)))}
        self._backend.add_special_tokens(list(self._special.values()))
        self.bos = None if config.get("add_bos_token") is False else self._id("bos_token")
        self.eos = self._id("eos_token")
        self.chat_template = _chat_template(self.folder, config)

    def _id(self, name: str) -> Optional[int]:
        return self._backend.token_to_id(self._special[name]) if name in self._special else None

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt: the chat template with its generation prompt if there is one, else BOS (if any) and the text.

        Raises R0312 if the template fails on it.
        """
        if self.chat_template is not None:
            return self._ids(self._render(text))
        return self._begin() + self._ids(text)

    def encode_response(self, text: str, bound: int) -> tuple[list[int], bool]:
        """The text's tokens and one end token, and False; or, if that is more than `bound` tokens, its first `bound`
        tokens without an end token, and True (truncated). Raises R0311 if the tokenizer has no end token."""
        ids = self._ids(text)
        if len(ids) + 1 > bound:
            return ids[:bound], True
        return ids + [self._end()], False

    def encode_text(self, text: str, bound: int) -> tuple[list[int], list[int], bool]:
        """Plain text as (prompt, response, truncated): the prompt is BOS; without a BOS it is the text's first token,
        which has no log-probability, does not count, and is not counted against `bound`. The text may be empty only
        where there is a BOS (ValueError)."""
        if self.bos is not None:
            return [self.bos], *self.encode_response(text, bound)
        ids = self._ids(text)
        if not ids:
            raise ValueError("a tokenizer without BOS cannot make a sequence of an empty text")
        cut = len(ids) > bound
        return ids[:1], ids[1:bound + 1] if cut else ids[1:] + [self._end()], cut

    def decode(self, ids) -> str:
        """The text of a response; special tokens are left out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Every end token of the tokenizer and of the generation configuration (the model's, if the folder has no
        generation configuration), the tokenizer's first."""
        generation = self.folder / "generation_config.json"
        config = _read_json(generation if generation.exists() else self.folder / "config.json")
        more = config.get("eos_token_id")
        ids = [self.eos, *(more if isinstance(more, list) else [more])]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    @cached_property
    def identity(self) -> str:
        """SHA-256 of what decides the token ids of a text. Tokenizers of equal identity can exchange tokens."""
        parts = json.loads(self._backend.to_str())
        for unrelated in ("truncation", "padding", "post_processor", "decoder"):
            parts.pop(unrelated, None)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def form(self) -> tuple:
        """What decides the tokens of a prompt with its response: the identity, the template, and begin and end tokens."""
        return self.identity, self.chat_template, self.bos, self.eos

    @property
    def size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _begin(self) -> list[int]:
        return [] if self.bos is None else [self.bos]

    def _end(self) -> int:
        if self.eos is None and not self.end_ids:
            raise fault("R0311", place=str(self.folder))
        return self.end_ids[0]

    def _render(self, text: str) -> str:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        chat = [{"role": "user", "content": text}]
        try:
            rendered, _ = render_jinja_template(
                [chat], chat_template=self.chat_template, add_generation_prompt=True, **self._special)
        except (TemplateError, TypeError, ValueError) as error:
            raise fault("R0312", place=str(self.folder), reason=str(error)) from error
        return rendered[0]


def _load_backend(folder: Path, config: dict) -> tuple[Any, dict]:
    """The `tokenizers.Tokenizer` of a folder, and its configuration."""
    if not folder.is_dir():
        raise fault("R0310", place=str(folder), reason="it is not a folder", help="give a local Hugging Face folder")
    if not (folder / "tokenizer.json").exists():
        return _converted(folder)
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(folder / "tokenizer.json")), config
    except Exception as error:  # the library raises bare Exceptions
        raise _unreadable(folder / "tokenizer.json", str(error)) from error


def _converted(folder: Path) -> tuple[Any, dict]:
    """A backend made by `transformers` from an older format (SentencePiece, vocab.json and merges.txt)."""
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        special = {name: getattr(made, name, None) for name in SPECIAL}
        return made.backend_tokenizer, {**special, "chat_template": made.chat_template}
    except Exception as error:  # whatever a missing or broken file makes the library raise
        reason = f"there is no tokenizer.json, and `transformers` cannot convert what is there ({type(error).__name__})"
        raise fault("R0310", place=str(folder), reason=reason) from error


def _chat_template(folder: Path, config: dict) -> Optional[str]:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):  # several named templates
        return {entry["name"]: entry["template"] for entry in given}.get("default")
    if isinstance(given, dict):
        return given.get("default")
    return given


def _content(token) -> Optional[str]:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unreadable(path, f"not JSON, {error}") from error


def _unreadable(path: Path, reason: str) -> DiagnosticError:
    return fault("R0310", place=str(path), reason=reason, help="save the tokenizer again")
