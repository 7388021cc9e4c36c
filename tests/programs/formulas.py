"""The papers' formulas in plain loops over rows, samples and tokens, independent of the language, compiler and runtime.

Each takes an `Iteration`: the numbers that models and Python ops gave. Those of the rollout are floats; those of the
update are scalars of torch, into which objectives differentiate. It returns the rows that count, the objectives of a
mini-batch as functions of its rows, and the metrics of the rollout. Values are nested lists: x[row][token], or
x[row][sample][token].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Mapping, Sequence

import torch

Rows = Sequence[int]


@dataclass(frozen=True)
class Iteration:
    """old, new: results of calls, `actor.logprobs(y)`, in rollout and update; params: by name, dims among them."""

    params: Mapping[str, float]
    old: Mapping[str, list]
    new: Mapping[str, list]
    data: Mapping[str, list] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Formula:
    """kept: by root dim, rows that take part; objectives: model → its objective on rows of each root dim."""

    kept: Mapping[str, Rows]
    objectives: Mapping[str, Callable[[Mapping[str, Rows]], torch.Tensor]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)


# ---- small sums --------------------------------------------------------------------------------------


def average(numbers: Sequence) -> float:
    return sum(numbers) / len(numbers) if len(numbers) else 0.0


def deviation(numbers: Sequence[float]) -> float:
    """With n - 1; 0 of one number, and exactly 0 of equal ones."""
    if len(numbers) < 2 or len(set(numbers)) == 1:
        return 0.0
    centre = average(numbers)
    return math.sqrt(sum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


def standardized(rows: list[list[float]]) -> list[list[float]]:
    """All tokens of all rows less their mean, over their standard deviation."""
    every = [x for row in rows for x in row]
    if len(every) < 2:
        return rows
    centre, spread = average(every), deviation(every)
    return [[(x - centre) / spread if spread else 0.0 for x in row] for row in rows]


def clipped_surrogate(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def surrogates(new: list, old: list[float], adv: list[float], low: float, high: float) -> list[torch.Tensor]:
    """Of each token of a response."""
    return [clipped_surrogate(torch.exp(n - o), a, low, high) for n, o, a in zip(new, old, adv)]


def penalized(score: float, logp: list[float], logp_ref: list[float], beta: float) -> list[float]:
    """Reward of each token: the penalty for its log-ratio, and the score at the last."""
    rewards = [-beta * (p - q) for p, q in zip(logp, logp_ref)]
    rewards[-1] += score
    return rewards


def returns_to_go(rewards: list[float]) -> list[float]:
    return [sum(rewards[t:]) for t in range(len(rewards))]


def advantages(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE as its definition has it: sum over k of (gamma lam)^k delta_{t+k}."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


def value_error(new: list, old: list[float], target: list[float], eps: float) -> list[torch.Tensor]:
    """Of each token half the greater of the squared errors of the value and of the value near the old one."""
    found = []
    for v, v_old, wanted in zip(new, old, target):
        held = torch.clamp(v, v_old - eps, v_old + eps)
        found.append(0.5 * torch.maximum((v - wanted) ** 2, (held - wanted) ** 2))
    return found


def tokens(rows: Rows, terms: Callable[[int], list]) -> list:
    return [term for i in rows for term in terms(i)]


def rows_of(x: Iteration, root: str = "b") -> range:
    return range(int(x.params[root]))


def mean_sum_of_differences(left: list, right: list) -> float:
    return average([sum(p - q for p, q in zip(a, b)) for a, b in zip(left, right)])


# ---- with a critic -----------------------------------------------------------------------------------


def ppo(x: Iteration) -> Formula:
    """1707.06347 equation 7 on rewards of 2203.02155 equation 2."""
    p, logp_old, ref = x.params, x.old["actor.logprobs(y)"], x.old["ref.logprobs(y)"]
    score, v_old = x.old["reward.score(y)"], x.old["critic.values(y)"]
    rewards = [penalized(score[i], logp_old[i], ref[i], p["beta"]) for i in rows_of(x)]
    plain = [advantages(rewards[i], v_old[i], p["gamma"], p["lam"]) for i in rows_of(x)]
    target = [[a + v for a, v in zip(plain[i], v_old[i])] for i in rows_of(x)]
    adv = standardized(plain)

    def policy(rows):
        logp = x.new["actor.logprobs(y)"]
        return average(tokens(rows["b"], lambda i: surrogates(logp[i], logp_old[i], adv[i], p["eps"], p["eps"])))

    def critic(rows):
        v = x.new["critic.values(y)"]
        return average(tokens(rows["b"], lambda i: value_error(v[i], v_old[i], target[i], p["eps_v"])))

    metrics = {"kl": mean_sum_of_differences(logp_old, ref), "reward": average(score)}
    return Formula({"b": rows_of(x)}, {"actor": policy, "critic": critic}, metrics)


def ppo_ptx(x: Iteration) -> Formula:
    """2203.02155 equation 2: PPO, and gamma E[log pi(text)] with a denominator of its own."""
    base = ppo(x)

    def policy(rows):
        loglik = average([sum(x.new["actor.logprobs(text)"][j]) for j in rows["c"]])
        return base.objectives["actor"](rows) + x.params["ptx"] * loglik

    return Formula(base.kept | {"c": rows_of(x, "c")}, base.objectives | {"actor": policy}, base.metrics)


def safe_rlhf(x: Iteration) -> Formula:
    """2310.12773: multiplier first, then reward and cost advantages joined, then the clip."""
    p, logp_old, ref = x.params, x.old["actor.logprobs(y)"], x.old["ref.logprobs(y)"]
    score, harm = x.old["reward.score(y)"], x.old["cost.score(y)"]
    v_r, v_c = x.old["critic.values(y)"], x.old["cost_critic.values(y)"]
    log_lam = x.state["log_lam"] + p["alpha"] * math.exp(x.state["log_lam"]) * (average(harm) - p["limit"])
    lam, adv, target_r, target_c = math.exp(log_lam), [], [], []
    for i in rows_of(x):
        good = advantages(penalized(score[i], logp_old[i], ref[i], p["beta"] / 2), v_r[i], p["gamma"], p["gae_lam"])
        bad = advantages(penalized(harm[i], logp_old[i], ref[i], -p["beta"] / 2), v_c[i], p["gamma"], p["gae_lam"])
        adv.append([(a - lam * c) / (1 + lam) for a, c in zip(good, bad)])
        target_r.append([a + v for a, v in zip(good, v_r[i])])
        target_c.append([c + v for c, v in zip(bad, v_c[i])])

    def policy(rows):
        logp = x.new["actor.logprobs(y)"]
        return average(tokens(rows["b"], lambda i: surrogates(logp[i], logp_old[i], adv[i], p["eps"], p["eps"])))

    def critic(v, old, target):
        return lambda rows: average(tokens(rows["b"], lambda i: value_error(v[i], old[i], target[i], p["eps_v"])))

    kl = mean_sum_of_differences(logp_old, ref)
    metrics = {"kl": kl, "reward": average(score), "cost": average(harm), "lam": lam}
    objectives = {"actor": policy, "critic": critic(x.new["critic.values(y)"], v_r, target_r),
                  "cost_critic": critic(x.new["cost_critic.values(y)"], v_c, target_c)}
    return Formula({"b": rows_of(x)}, objectives, metrics, {"log_lam": log_lam})


# ---- one response, no critic -------------------------------------------------------------------------


def remax(x: Iteration) -> Formula:
    """2310.10505 algorithm 1: the greedy response's score is the baseline."""
    p, logp, ref = x.params, x.old["actor.logprobs(y)"], x.old["ref.logprobs(y)"]
    score, greedy = x.old["reward.score(y)"], x.old["reward.score(greedy)"]

    def policy(rows):
        terms = []
        for i in rows["b"]:
            gains = returns_to_go(penalized(score[i], logp[i], ref[i], p["beta"]))
            terms.append(sum(new * (gain - greedy[i]) for new, gain in zip(x.new["actor.logprobs(y)"][i], gains)))
        return average(terms)

    metrics = {"kl": mean_sum_of_differences(logp, ref), "reward": average(score)}
    return Formula({"b": rows_of(x)}, {"actor": policy}, metrics)


def reinforce_pp(x: Iteration) -> Formula:
    """2501.03262 with one response to a prompt."""
    p, logp_old, ref, score = x.params, x.old["actor.logprobs(y)"], x.old["ref.logprobs(y)"], x.old["reward.score(y)"]
    adv = standardized([returns_to_go(penalized(score[i], logp_old[i], ref[i], p["beta"])) for i in rows_of(x)])

    def policy(rows):
        logp = x.new["actor.logprobs(y)"]
        return average(tokens(rows["b"], lambda i: surrogates(logp[i], logp_old[i], adv[i], p["eps"], p["eps"])))

    metrics = {"kl": mean_sum_of_differences(logp_old, ref), "reward": average(score)}
    return Formula({"b": rows_of(x)}, {"actor": policy}, metrics)


def distill(x: Iteration) -> Formula:
    """2306.13649, reverse KL, by the drawn token; 2306.08543's single step."""
    logp_old, teacher = x.old["student.logprobs(y)"], x.old["teacher.logprobs(y, temperature=0.5)"]

    def policy(rows):
        return average(tokens(rows["b"], lambda i: [
            torch.exp(new - old) * (old - wanted)
            for new, old, wanted in zip(x.new["student.logprobs(y)"][i], logp_old[i], teacher[i])]))

    return Formula({"b": rows_of(x)}, {"student": policy}, {"kl": mean_sum_of_differences(logp_old, teacher)})


# ---- from data ---------------------------------------------------------------------------------------


def _log_ratios(x: Iteration, response: str) -> Callable[[int], torch.Tensor]:
    new, ref = x.new[f"actor.logprobs({response})"], x.new[f"ref.logprobs({response})"]
    return lambda i: sum(a - b.detach() for a, b in zip(new[i], ref[i]))


def dpo(x: Iteration) -> Formula:
    """2305.18290 equation 7."""
    good, bad, beta = _log_ratios(x, "good"), _log_ratios(x, "bad"), x.params["beta"]
    return Formula({"b": rows_of(x)}, {"actor": lambda rows: average(
        [-torch.log1p(torch.exp(-beta * (good(i) - bad(i)))) for i in rows["b"]])})


def ipo(x: Iteration) -> Formula:
    """2310.12036 equation 17."""
    good, bad, tau = _log_ratios(x, "good"), _log_ratios(x, "bad"), x.params["tau"]
    return Formula({"b": rows_of(x)}, {"actor": lambda rows: average(
        [(good(i) - bad(i) - 1 / (2 * tau)) ** 2 for i in rows["b"]])})


def kto(x: Iteration) -> Formula:
    """2402.01306 section 4.1."""
    p, gain, mismatched = x.params, _log_ratios(x, "y"), _log_ratios(x, "mismatched")

    def policy(rows):
        z = max(0.0, average([float(mismatched(i).detach()) for i in rows["b"]]))
        return average([
            p["desired"] * torch.sigmoid(p["beta"] * (gain(i) - z)) if x.data["desirable"][i] else
            p["not_so"] * torch.sigmoid(p["beta"] * (z - gain(i))) for i in rows["b"]])

    return Formula({"b": rows_of(x)}, {"actor": policy})


def sft(x: Iteration) -> Formula:
    """The mean over all tokens of all responses."""
    logp = x.new["actor.logprobs(answer)"]
    return Formula({"b": rows_of(x)}, {"actor": lambda rows: average(tokens(rows["b"], lambda i: logp[i]))})


def reward_model(x: Iteration) -> Formula:
    """2203.02155 equation 1, one pair a prompt."""
    good, bad = x.new["reward.score(good)"], x.new["reward.score(bad)"]
    return Formula({"b": rows_of(x)}, {"reward": lambda rows: average(
        [torch.log(torch.sigmoid(good[i] - bad[i])) for i in rows["b"]])})
