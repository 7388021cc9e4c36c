"""Makes the random-initialised folders that `builtin:tiny` and `builtin:tiny-reward` are trained from.

    python make_tokenizer.py --out FOLDER [--seed 0] [--std 0.08]

writes FOLDER/tiny (LlamaForCausalLM) and FOLDER/tiny-reward (LlamaForSequenceClassification with one label): a
character-level tokenizer (tokenizer.json, tokenizer_config.json), config.json, and random weights in bf16.
Text becomes `<s>` and one token per printable ASCII character; a response ends with `</s>`.
"""
import argparse
import json
from pathlib import Path

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
VOCAB_SIZE = 104            # 4 special tokens, 95 printable characters, newline, 4 spare: divisible by 8
MAX_LENGTH = 128


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, processors

    names = [PAD, BOS, EOS, UNK] + [chr(c) for c in range(32, 127)] + ["\n"]
    names += [f"<spare{i}>" for i in range(VOCAB_SIZE - len(names))]
    tok = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token=UNK))
    tok.decoder = decoders.Fuse()
    tok.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    tok.add_special_tokens([PAD, BOS, EOS, UNK])
    return tok


def save_tokenizer(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_LENGTH,
        "bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK,
        "clean_up_tokenization_spaces": False, "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--std", type=float, default=0.08, help="standard deviation of the initial matrices")
    args = parser.parse_args()

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    shape = dict(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5, tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
        initializer_range=args.std, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    for name, kind, extra in (("tiny", LlamaForCausalLM, {}), ("tiny-reward", LlamaForSequenceClassification, {"num_labels": 1})):
        torch.manual_seed(args.seed)
        model = kind(LlamaConfig(**shape, **extra))
        with torch.no_grad():                       # the same numbers whatever transformers does by default
            generator = torch.Generator().manual_seed(args.seed)
            for key, weight in sorted(model.named_parameters()):
                weight.normal_(0, args.std, generator=generator) if weight.dim() > 1 else weight.fill_(1)
        folder = args.out / name
        save_tokenizer(folder)
        model.to(torch.bfloat16).save_pretrained(folder)
        print(folder, sum(p.numel() for p in model.parameters()), "parameters")


if __name__ == "__main__":
    main()
