"""A scorer with a tokenizer or a template of its own reads a response as text, encoded again in its own form."""

from __future__ import annotations

import torch

from rlhf_dsl.typed import Expr, Interner
from runtime.executor.loading import pack
from runtime.executor.model_calls import response_name
from runtime.executor.python_calls import texts
from runtime.executor.scope import Scope, gather
from runtime.tokenizer import Tokenizer
from runtime.values import Value
from runtime.world import World


def readable(world: World, scope: Scope, response: Expr, model: str, written: Tokenizer, read: Tokenizer, interner: Interner) -> Expr:
    """The response in tokens of `read`: itself where the tokenizers agree, else one that is made once an iteration.

    written: the tokenizer of the response; read: that of `model`.
    """
    if written is read or written.form == read.form:
        return response
    name = f"{response_name(response)} as {model} reads it"
    again = interner.expr("reencoded", (response,), response.type, name=name)
    while scope.parent is not None:
        scope = scope.parent
    if again not in scope.env:
        _reencode(world, scope, response, again, written, read)
    return again


def _reencode(world: World, scope: Scope, response: Expr, again: Expr, written: Tokenizer, read: Tokenizer) -> None:
    rows, dims = scope.rows, response.type.dims
    batch = scope.env[response].data
    prompts = scope.prompt_texts[response_name(response)]
    # The bound of the dim counts the policy's tokens; here the whole text is read.
    cut = batch.truncated.tolist() if batch.truncated is not None else [False] * len(batch)
    made = pack([_again(read, *row) for row in zip(prompts, texts(batch, written), cut)])
    facts = torch.stack([made.prompt_lengths, made.response_lengths], 1)
    known = gather(world, scope, rows.dims.sample_dims(dims), facts)
    name = again.attr("name")
    rows.prompt_lengths[name], rows.response_lengths[name] = known[:, 0].contiguous(), known[:, 1].contiguous()
    rows.own[name] = False
    scope.env[again] = Value(dims, made)


def _again(read: Tokenizer, prompt: str, text: str, truncated: bool) -> tuple[list[int], list[int], bool]:
    """(prompt, response, truncated); a response that did not end gets no end token here either."""
    ids, _ = read.encode_response(text, len(text.encode()) + 2)
    ids = ids[:-1] if truncated and len(ids) > 1 else ids
    return read.encode_prompt(prompt), ids, truncated
