"""The formulas of papers that sample a group of responses to each prompt; see `formulas`."""

from __future__ import annotations

import math
from typing import Callable

import torch

from tests.programs.formulas import (
    Formula, Iteration, Rows, advantages, average, clipped_surrogate, deviation, rows_of, surrogates,
)


def group_advantages(rewards: list[list[float]]) -> list[list[float]]:
    return [[(r - average(group)) / (deviation(group) + 1e-6) for r in group] for group in rewards]


def _grouped(x: Iteration, adv: list, kept: Rows, objective: Callable, rewards: list) -> Formula:
    """objective(logp, logp_old, advantage) gives the terms of one response; the mean is over those of all."""
    logp_old = x.old["actor.logprobs(y)"]

    def policy(rows):
        terms = [objective(x.new["actor.logprobs(y)"][i][k], logp_old[i][k], adv[i][k])
                 for i in rows["b"] for k in range(len(adv[i]))]
        return average([term for response in terms for term in response])

    return Formula({"b": kept}, {"actor": policy}, {"reward": average([r for group in rewards for r in group])})


def _token_surrogates(low: float, high: float) -> Callable:
    return lambda new, old, a: surrogates(new, old, [a] * len(new), low, high)


def grpo(x: Iteration) -> Formula:
    """2402.03300 equations 3 and 4, all tokens of the mini-batch alike."""
    p, right = x.params, x.old["exact_match(y.text, answer)"]
    ref, logp_old, adv = x.old["ref.logprobs(y)"], x.old["actor.logprobs(y)"], group_advantages(right)

    def policy(rows):
        terms = []
        for i in rows["b"]:
            for k, a in enumerate(adv[i]):
                for new, old, q in zip(x.new["actor.logprobs(y)"][i][k], logp_old[i][k], ref[i][k]):
                    divergence = torch.exp(q - new) - (q - new) - 1
                    surrogate = clipped_surrogate(torch.exp(new - old), a, p["eps"], p["eps"])
                    terms.append(surrogate - p["beta"] * divergence)
        return average(terms)

    return Formula({"b": rows_of(x)}, {"actor": policy}, {"reward": average([r for group in right for r in group])})


def dr_grpo(x: Iteration) -> Formula:
    """2503.20783: no standard deviation, no lengths; a constant instead."""
    p, right = x.params, x.old["exact_match(y.text, answer)"]
    adv = [[r - average(group) for r in group] for group in right]
    of_tokens = _token_surrogates(p["eps"], p["eps"])
    return _grouped(x, adv, rows_of(x), lambda *response: [sum(of_tokens(*response)) / p["t"]], right)


def dapo(x: Iteration) -> Formula:
    """2503.14476 equations 8 to 13."""
    p, right, logp = x.params, x.old["exact_match(y.text, answer)"], x.old["actor.logprobs(y)"]
    longest, cache = p["t"], p["cache"]

    def punishment(length):
        return 0.0 if length <= longest - cache else ((longest - cache) - length) / cache

    rewards = [[r + punishment(len(logp[i][k])) for k, r in enumerate(group)] for i, group in enumerate(right)]
    kept = [i for i in rows_of(x) if 0 < sum(right[i]) < p["g"]]
    return _grouped(x, group_advantages(rewards), kept, _token_surrogates(p["eps_low"], p["eps_high"]), right)


def gspo(x: Iteration) -> Formula:
    """2507.18071 equations 5 to 7."""
    p, right = x.params, x.old["exact_match(y.text, answer)"]

    def response(new, old, a):
        ratio = torch.exp(sum(n - o for n, o in zip(new, old)) / len(new))
        return [clipped_surrogate(ratio, a, p["eps_low"], p["eps_high"])]

    return _grouped(x, group_advantages(right), rows_of(x), response, right)


def cispo(x: Iteration) -> Formula:
    """2506.13585 equations 4 and 5: the weight is a number."""
    p, right = x.params, x.old["exact_match(y.text, answer)"]

    def response(new, old, a):
        ratios = [math.exp(float(n.detach()) - o) for n, o in zip(new, old)]
        weights = [min(max(ratio, 1 - p["eps_low"]), 1 + p["eps_high"]) for ratio in ratios]
        return [weight * a * n for weight, n in zip(weights, new)]

    return _grouped(x, group_advantages(right), rows_of(x), response, right)


def rloo(x: Iteration) -> Formula:
    """2402.14740: the baseline of a response is the mean of the others' rewards."""
    p, logp, ref, score = x.params, x.old["actor.logprobs(y)"], x.old["ref.logprobs(y)"], x.old["reward.score(y)"]
    rewards, adv = [], []
    for i in rows_of(x):
        divergence = [sum(a - b for a, b in zip(*pair)) for pair in zip(logp[i], ref[i])]
        rewards.append([s - p["beta"] * d for s, d in zip(score[i], divergence)])
        adv.append([r - average(rewards[i][:k] + rewards[i][k + 1:]) for k, r in enumerate(rewards[i])])
    kl = average([sum(a - b for a, b in zip(*pair)) for i in rows_of(x) for pair in zip(logp[i], ref[i])])
    found = _grouped(x, adv, rows_of(x), lambda new, old, a: [a * sum(new)], score)
    return Formula(found.kept, found.objectives, found.metrics | {"kl": kl})


def opo(x: Iteration) -> Formula:
    """2505.23585: a mean of rewards, weighted by lengths, is the baseline."""
    right, logp, adv = x.old["exact_match(y.text, answer)"], x.old["actor.logprobs(y)"], []
    for group, responses in zip(right, logp):
        lengths = [len(response) for response in responses]
        baseline = sum(n * r for n, r in zip(lengths, group)) / sum(lengths)
        adv.append([r - baseline for r in group])
    return _grouped(x, adv, rows_of(x), lambda new, old, a: [a * sum(new)], right)


def online_dpo(x: Iteration) -> Formula:
    """2402.04792 with a reward model as judge; equal scores make no pair."""
    p, score, ref = x.params, x.old["reward.score(y)"], x.old["ref.logprobs(y)"]
    kept = [i for i in rows_of(x) if len(set(score[i])) > 1]

    def policy(rows):
        terms = []
        for i in rows["b"]:
            pairs = zip(x.new["actor.logprobs(y)"][i], ref[i])
            gain = [p["beta"] * sum(a - b for a, b in zip(*pair)) for pair in pairs]
            best = [g for g, s in zip(gain, score[i]) if s == max(score[i])]
            worst = [g for g, s in zip(gain, score[i]) if s == min(score[i])]
            terms.append(-torch.log1p(torch.exp(-(average(best) - average(worst)))))
        return average(terms)

    return Formula({"b": kept}, {"actor": policy}, {"reward": average([s for group in score for s in group])})


def vapo(x: Iteration) -> Formula:
    """2504.05118: lambda of 1 for the critic, 1 - 1 / (alpha l) for the policy, and the right responses' likelihood."""
    p, logp_old = x.params, x.old["actor.logprobs(y)"]
    right, v_old = x.old["exact_match(y.text, answer)"], x.old["critic.values(y)"]

    def advantage(i, k, lam):
        n = len(v_old[i][k])
        return advantages([0.0] * (n - 1) + [right[i][k]], v_old[i][k], 1.0, lam)

    def policy(rows):
        logp, surrogate, positive = x.new["actor.logprobs(y)"], [], []
        for i in rows["b"]:
            for k, r in enumerate(right[i]):
                lam = max(0.0, 1 - 1 / (p["alpha"] * len(logp[i][k])))
                for new, old, a in zip(logp[i][k], logp_old[i][k], advantage(i, k, lam)):
                    surrogate.append(clipped_surrogate(torch.exp(new - old), a, p["eps_low"], p["eps_high"]))
                positive += logp[i][k] if r == 1 else []
        return average(surrogate) + p["mu"] * average(positive)

    def critic(rows):
        errors = []
        for i in rows["b"]:
            for k, r in enumerate(right[i]):
                errors += [0.5 * (v - r) ** 2 for v in x.new["critic.values(y)"][i][k]]  # the return is r
        return average(errors)

    metrics = {"reward": average([r for group in right for r in group])}
    return Formula({"b": rows_of(x)}, {"actor": policy, "critic": critic}, metrics)
