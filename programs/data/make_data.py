"""Writes the data of the demonstration next to this file: two-digit addition, "17+48=" -> "65".

    python make_data.py [FOLDER]

sft.jsonl          prompt, answer            demonstrations by people who often err: see `demonstration`
preferences.jsonl  prompt, chosen, rejected  a right answer and a wrong one, wrong in one of many ways
unpaired.jsonl     prompt, response, desirable, other
                                             one answer a row, right or wrong; `other` is the next row's answer
text.jsonl         text                      solved sums as plain text, "17+48=65"
prompts.jsonl      prompt, answer            for reinforcement learning
heldout.jsonl      prompt, answer            512 sums that occur nowhere above, in neither order of their terms

Deterministic: one seed, the standard library only.
"""
import json
import random
import sys
from pathlib import Path

SEED = 20240611
HELD_OUT = 512
DEMONSTRATIONS = 4          # per prompt
PAIRS = 3                   # preference pairs per prompt
UNPAIRED, TEXTS = 6000, 4000
FORGETFUL, CARELESS = 0.60, 0.05


def without_carries(a, b):
    """The sum as someone writes it who forgets every carry: 17+48 -> 55, 83+54 -> 37."""
    tens, units = (a // 10 + b // 10) % 10, (a % 10 + b % 10) % 10
    return str(10 * tens + units)


def slip(rng, text):
    """The text with one digit replaced by another."""
    i = rng.randrange(len(text))
    return text[:i] + rng.choice([d for d in "0123456789" if d != text[i]]) + text[i + 1:]


def demonstration(rng, a, b):
    """An answer by one of three people: the first forgets carries, the second slips, the third is right."""
    who = rng.random()
    if who < FORGETFUL:
        return without_carries(a, b)
    return slip(rng, str(a + b)) if who < FORGETFUL + CARELESS else str(a + b)


def wrong(rng, a, b):
    """A wrong answer, of a kind drawn at random."""
    right = str(a + b)
    while True:
        kind = rng.random()
        if kind < 0.35:
            text = without_carries(a, b)
            if rng.random() < 0.15:
                text = slip(rng, text)
        elif kind < 0.60:
            text = slip(rng, right)
        elif kind < 0.80:
            text = str(abs(a + b + rng.choice([-1, 1, -2, 2, -10, 10, -9, 9, -11, 11, -100, 100])))
        elif kind < 0.88:
            text = str(rng.randrange(200))
        elif kind < 0.91:
            text = str(abs(a - b))
        elif kind < 0.94:                                   # a digit too many
            i = rng.randrange(len(right) + 1)
            text = right[:i] + rng.choice("0123456789") + right[i:]
        elif kind < 0.97:                                   # a digit too few, at worst none
            i = rng.randrange(len(right))
            text = right[:i] + right[i + 1:]
        else:
            text = rng.choice([right[::-1], right + right, f"{a}{b}", f"0{right}", str(a), str(b)])
        if text != right:
            return text


def unpaired(rng, pairs):
    """Sums with one answer each, wrong ones as often as right ones, and the answer of the next row beside it."""
    rows = []
    for a, b in pairs:
        desirable = rng.random() < 0.5
        response = str(a + b) if desirable else wrong(rng, a, b)
        rows.append({"prompt": f"{a}+{b}=", "response": response, "desirable": desirable})
    following = rows[1:] + rows[:1]
    return [row | {"other": next_row["response"]} for row, next_row in zip(rows, following)]


def write(path, rows):
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    print(f"{path.name}: {len(rows)} rows, {path.stat().st_size / 1e6:.2f} MB")


def main(folder):
    rng = random.Random(SEED)
    sums = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(sums)
    held_out = sums[:HELD_OUT]
    hidden = {frozenset(pair) for pair in held_out}
    train = [pair for pair in sums if frozenset(pair) not in hidden]

    def prompt(pair):
        return "%d+%d=" % pair

    def solved(pairs):
        return [{"prompt": prompt(p), "answer": str(sum(p))} for p in pairs]

    sft = [{"prompt": prompt(p), "answer": demonstration(rng, *p)} for p in train for _ in range(DEMONSTRATIONS)]
    preferences = [{"prompt": prompt(p), "chosen": str(sum(p)), "rejected": wrong(rng, *p)}
                   for p in train for _ in range(PAIRS)]
    rng.shuffle(sft)
    rng.shuffle(preferences)
    write(folder / "sft.jsonl", sft)
    write(folder / "preferences.jsonl", preferences)
    write(folder / "prompts.jsonl", solved(train))
    write(folder / "heldout.jsonl", solved(held_out))
    rng = random.Random(SEED + 1)
    write(folder / "unpaired.jsonl", unpaired(rng, rng.sample(train, UNPAIRED)))
    write(folder / "text.jsonl", [{"text": f"{a}+{b}={a + b}"} for a, b in rng.sample(train, TEXTS)])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
