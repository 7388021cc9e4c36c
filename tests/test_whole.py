"""Some random programs that are right; `python -m tests.whole --count 10000` compiles as many as wanted."""

from collections import Counter

from tests import whole

SEED, COUNT = 2026, 40


def test_what_is_right_compiles():
    seen = Counter()
    found = list(whole.campaign(SEED, range(COUNT), seen))
    assert not found, "\n".join(f"{one.number}: {one.reason}\n{one.text}" for one in found)
    assert seen["checked"] >= 0.9 * COUNT and seen["compiled"] >= 2 * COUNT
    assert seen["retain"] > 0


def test_a_number_is_always_the_same_program():
    texts = [whole.written(3, i)[0].text for i in range(20)]
    assert texts == [whole.written(3, i)[0].text for i in range(20)] and len(set(texts)) == 20


def test_the_whole_language_is_written():
    """What the language has stands in some of the programs."""
    text = "\n".join(whole.written(SEED, i)[0].text for i in range(400))
    said = ("generate(", "reply(", ".logprobs(", ".entropy(", "temperature=0.6)", ".values(", ".last_value(",
            ".score(", ".scores(", ".text", ".truncated", ".logprobs ", "keep if", "refill=", "next(s0)", "next[",
            "togo[", "at_end[", "length[", "rank[", "argmax[", "quantile", "std", "where=", "whiten(", "gae(", "k3(",
            "any", "all", "stop(", "minibatches=1)", "minibatches=2", "epochs=2", "lag = 1", "ema(", "copy(", "eval(",
            "eval:", "judge(", "level(", "scaled(", "total(", "high(", "turned(")
    assert [word for word in said if word not in text] == []
