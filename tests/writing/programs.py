"""Random whole programs: data, models, responses, equations, keeps, states, updates, evaluations, a run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.writing.equations import Writer
from tests.writing.nodes import Dims, Known, Node, Response, name

FUNCTIONS = '''
fn half(x):
    return 0.5 * x

fn blend(x, y, k):
    """Some of each."""
    z = k * x
    return z + (1 - k) * y

fn discounted(r[t], d):
    return togo[t](r, d) - next[t](r)

fn both(x[t], k):
    s = sum[t](x)
    return s * k, x - k
'''
OPTIONS = ("", "", "", ", temperature=0.7", ", top_k=20", ", top_p=0.9", ", temperature=1.3, max_tokens=3",
           ", min_tokens=2", ", temperature=0", ', stop=["1"]')
OPTIMIZERS = ("adamw(lr=3e-4)", "adamw(lr=1e-3, weight_decay=0.1)", "adamw(lr=5e-4, max_grad_norm=0.5)",
              "adamw(lr=cosine(1e-3, warmup=2))", "adamw(lr=linear(1e-3), betas=[0.8, 0.9])")
RAGGED = ("t", "u", "v", "w", "x1", "x2")
OPS = ("judge", "level", "scaled", "shrink", "total", "high", "turned")


@dataclass(frozen=True)
class Program:
    """A text without `plan:`. roles: of all models; trained: those of some update; sampling: those that generate."""

    text: str
    roles: dict[str, str]
    trained: tuple[str, ...]
    sampling: tuple[str, ...]
    lag: int

    def with_plan(self, lines: tuple[str, ...]) -> str:
        return self.text + ("\nplan:\n" + "".join(f"    {line}\n" for line in lines) if lines else "")


@dataclass
class _Draft:
    numbers: random.Random
    roles: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    ragged: list[str] = field(default_factory=list)
    sampling: set[str] = field(default_factory=set)
    count: int = 0

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def chance(self, share: float) -> bool:
        return self.numbers.random() < share


def program(numbers: random.Random, plain: bool = False) -> Program:
    """plain: without what the oracle does not evaluate."""
    return _Writing(numbers, plain).program()


class _Writing:
    def __init__(self, numbers: random.Random, plain: bool) -> None:
        self.plain, self.numbers, self.draft = plain, numbers, _Draft(numbers)
        self.sizes = {"b": numbers.choice((2, 4, 6)), "g": numbers.choice((1, 2, 3)), "h": 2,
                      "n": numbers.choice((2, 4)), "e": 3}
        self.pairs, self.with_prompts = self.draft.chance(0.4), self.draft.chance(0.9)
        self.pairs |= not self.with_prompts
        self.ops = self.draft.chance(0.4)
        self.known = Known(frozenset(("b", "n", "e")))
        self.texts: list[Node] = []
        self.states: list[str] = []
        self.keeps, self.trained = 0, []

    def program(self) -> Program:
        self._models()
        data = self._data()
        lag = int(self.draft.chance(0.12))
        rollout = self._rollout()
        states = self._following()
        updates = [line for i in range(self.numbers.choice((0, 1, 1, 1, 2))) for line in self._update(i)]
        evals = self._evaluation() if self.draft.chance(0.3) else []
        lines = [*self._dims(), "param eps = 0.2 in (0, 1)", *self._imports(), *data, *self._model_lines(), *states]
        text = "\n".join((*lines, FUNCTIONS, *rollout, *updates, *evals, *self._run(lag), ""))
        trained, sampling = tuple(dict.fromkeys(self.trained)), tuple(sorted(self.draft.sampling))
        return Program(text, self.draft.roles, trained, sampling, lag)

    # ---- declarations

    def _dims(self) -> list[str]:
        return [*(f"dim {d} = {size}" for d, size in self.sizes.items()), *(f"dim {t} <= 5" for t in self.draft.ragged)]

    def _models(self) -> None:
        roles = {"actor": "policy", "ref": "policy", "pupil": "policy", "critic": "value", "reward": "scorer"}
        wanted = {"actor": 1.0, "ref": 0.6, "pupil": 0.25, "critic": 0.5, "reward": 0.5}
        self.draft.roles = {m: role for m, role in roles.items() if self.draft.chance(wanted[m])}
        self.trainable = [m for m in self.draft.roles if m != "ref" and (m == "actor" or self.draft.chance(0.6))]

    def _model_lines(self) -> list[str]:
        folders = {"actor": "one", "ref": "two", "pupil": "one", "critic": "head", "reward": "head"}
        return [f'model {m} = {role}("models/{folders[m]}")' + self._optimizer(m)
                for m, role in self.draft.roles.items()]

    def _optimizer(self, model: str) -> str:
        return f" trained by {self.numbers.choice(OPTIMIZERS)}" if model in self.trainable else ""

    def _imports(self) -> list[str]:
        return [f"from writing_ops import {', '.join(OPS)}"] if self.ops else []

    def _data(self) -> list[str]:
        found = []
        if self.with_prompts:
            found.append('data prompts[b], answer[b], wt[b]: f32, good[b]: bool = '
                         'jsonl("rows.jsonl", "prompt", "answer", "weight", "good")')
            self.texts.append(Node("prompts", (), ("b",), "text"))
            self.known.values += [Node("wt", (), ("b",)), Node("good", (), ("b",), "bool")]
        if self.pairs:
            t, u = self._ragged(("n",)), self._ragged(("n",))
            found.append(f'data q[n], first[n, {t}], second[n, {u}] after q = '
                         'jsonl("rows.jsonl", "prompt", "answer", "other")')
            self.known.responses += [Response("first", ("n", t), "data"), Response("second", ("n", u), "data")]
            self.texts.append(Node("q", (), ("n",), "text"))
        return found

    def _ragged(self, lead: Dims) -> str:
        t = RAGGED[len(self.draft.ragged)]
        self.draft.ragged.append(t)
        self.known.lead[t] = lead
        return t

    # ---- rollout

    def _rollout(self) -> list[str]:
        self.states = [f"s{i}" for i in range(self.numbers.choice((0, 0, 1, 2)))]
        self.known.values += [Node(s) for s in self.states]
        lines = ["", "rollout:"]
        if self.with_prompts:
            lines.append(self._generate(self.known))
        if self.trainable and self.known.responses and self.draft.chance(0.4):
            lines += self._read(self.known, self._writer(self.known))
        for _ in range(self.numbers.randint(2, 6)):
            lines += self._statement(self.known)
        return [*lines, self._metric(self.known, self._writer(self.known))]

    def _writer(self, known: Known, trained: frozenset[str] = frozenset()) -> Writer:
        return Writer(self.numbers, known, self.draft.roles, trained, self.ops)

    def _statement(self, known: Known) -> list[str]:
        kind = self.numbers.choice(("bind", "bind", "bind", "read", "read", "metric", "keep", "response", "several"))
        writer = self._writer(known)
        if kind == "keep" and self.keeps < 2 and self.draft.chance(0.6):
            return self._keep(known, writer)
        if kind == "response" and len(self.draft.ragged) < 4 and self.draft.sampling:
            return [self._generate(known) if self.draft.chance(0.6) else self._reply(known)]
        if kind == "several" and known.responses:
            return self._several(known, writer)
        if kind == "read" and self.trainable and known.responses:
            return self._read(known, writer)
        return [self._metric(known, writer)] if kind == "metric" else [self._bind(known, writer.value(3))]

    def _bind(self, known: Known, node: Node, in_update: bool = False) -> str:
        bound = self.draft.fresh("v")
        known.values.append(name(bound, node, in_update))
        return f"    {bound} = {node.text}"

    def _read(self, known: Known, writer: Writer) -> list[str]:
        """What a training may read once more."""
        node = writer.output(model=self.numbers.choice(self.trainable))
        line = self._bind(known, node)
        known.read.append((node, known.values[-1]))
        return [line]

    def _metric(self, known: Known, writer: Writer) -> str:
        x = writer.value(2)
        text = x.text if not x.dims else f"mean({x.text})"
        return f"    metric {self.draft.fresh('m')} = {text}"

    def _several(self, known: Known, writer: Writer, in_update: bool = False) -> list[str]:
        y = self.numbers.choice(known.responses)
        x, k = writer.value(1, y.dims), writer.value(1, ())
        if y.dims[-1] not in x.dims:
            return []
        first, second = self.draft.fresh("v"), self.draft.fresh("v")
        form = self.numbers.choice(("gae({0}, {0}, 0.99, sigmoid({1}))", "both({}, {})"))
        node = Node(form, (x, k), x.dims)
        left = node if form.startswith("gae") else Node("sum({})", (node,), x.dims[:-1])
        known.values += [name(first, left, in_update), name(second, node, in_update)]
        return [f"    {first}, {second} = {form.format(x.text, k.text)}"]

    def _keep(self, known: Known, writer: Writer) -> list[str]:
        roots = [d for d in ("b", "n") if any(y.dims[0] == d for y in known.responses)]
        if not roots:
            return []
        root = self.numbers.choice(roots)
        x = writer.condition(2, (root, "g"))
        if root not in x.dims:
            return []
        self.keeps += 1
        refill = ", refill=2" if not self.plain and self.draft.chance(0.2) else ""
        known.pool.clear()
        return [f"    keep if {x.text}{refill}"]

    def _generate(self, known: Known) -> str:
        policies = [m for m, role in self.draft.roles.items() if role == "policy"]
        model = self.numbers.choice(policies)
        self.draft.sampling.add(model)
        prompt = self.numbers.choice(self.texts)
        if self.ops and self.draft.chance(0.2):
            prompt = Node("turned({})", (prompt,), prompt.dims, "text")
        groups = [d for d in ("g", "h") if d not in prompt.dims]
        lead = (*prompt.dims, *(d for d in groups if self.draft.chance(0.5)))
        lead = tuple(sorted(lead, key="bngh".index))
        options = self.numbers.choice(OPTIONS)
        return self._responded(known, lead, f"{model}.generate({prompt.text}{options})", "generate")

    def _reply(self, known: Known) -> str:
        prompt = self.numbers.choice(self.texts)
        fits = [t for t in self.texts if t.dims[0] == prompt.dims[0]]
        text = self.numbers.choice(fits)
        lead = tuple(sorted({*prompt.dims, *text.dims}, key="bngh".index))
        return self._responded(known, lead, f"reply({prompt.text}, {text.text})", "reply")

    def _responded(self, known: Known, lead: Dims, text: str, made: str) -> str:
        y = Response(self.draft.fresh("y"), (*lead, self._ragged(lead)), made)
        known.responses.append(y)
        self.texts.append(Node(f"{y.name}.text", (), lead, "text"))
        return f"    {y.name}[{', '.join(y.dims)}] = {text}"

    def _following(self) -> list[str]:
        found = []
        for i, state in enumerate(self.states):
            writer = self._writer(self.known)
            after = f" + 0.1 * next({self.states[i - 1]})" if i and self.draft.chance(0.5) else ""
            found.append(f"state {state} = 0.5 then clip({writer.value(2, ()).text}{after}, -1, 2)")
        if self.states:
            self.known.values.append(Node(f"next({self.states[0]})"))
        return found

    # ---- update

    def _update(self, index: int) -> list[str]:
        models = [m for m in self.trainable if self.draft.chance(0.95 if self._reads(m) else 0.5)] or self.trainable[:1]
        if not models or not self.known.responses:
            return []
        known, trained = self.known.branch(), frozenset(models)
        self.trained += models
        writer = self._writer(known, trained)
        lines = []
        for _ in range(self.numbers.randint(0, 3)):
            kind = self.numbers.choice(("bind", "bind", "metric", "several"))
            if kind == "several":
                lines += self._several(known, writer, True)
            else:
                lines.append(self._metric(known, writer) if kind == "metric" else
                             self._bind(known, writer.value(2), True))
        lines += [self._training(model, writer) for model in models]
        if self.draft.chance(0.3):
            lines.append(self._metric(known, writer))
        settings = self.numbers.choice(("", "", "epochs=1, minibatches=1", "minibatches=2", "epochs=2",
                                        "epochs=2, minibatches=2"))
        return ["", f"update({settings}):", *lines]

    def _training(self, model: str, writer: Writer) -> str:
        writer.separable = model
        terms = [self._term(model, writer) for _ in range(self.numbers.choice((1, 1, 2)))]
        writer.separable = ""
        return f"    train {model} to {self.numbers.choice(('maximize', 'minimize'))} {' + '.join(terms)}"

    def _term(self, model: str, writer: Writer) -> str:
        """A sum over rows of something that has an output of the model in it, by something that is known before."""
        read = self._reads(model)
        if read and self.draft.chance(0.7):
            call, known = self.numbers.choice(read)
            other = Node("({} + 0.37)", (known,), known.dims)  # a difference of 0 would be rounding
        else:
            call = writer.output(model=model)
            other = writer.value(2, call.dims)
        form = self.numbers.choice(("{c} * {o}", "{c} + {o}", "min({c}, {o}) + 0.3 * {c}", "({c} - stop({o})) ** 2",
                                    "exp(clip({c} - stop({c}), -1, 1)) * {o}", "where({o} > 0.0321, {c}, 0.2 * {c})"))
        inside = form.format(c=call.text, o=other.text)
        if call.text.startswith(f"{model}.logprobs") and self.draft.chance(0.4):
            inside += f" + 0.1 * {call.text.replace('.logprobs', '.entropy')}"
        fixed = [d for d in call.dims if d not in self.known.lead]
        form = self.numbers.choice((
            "mean({})", "mean({})", "mean(mean[{t}]({}))", "sum({}) / b", "mean({}, where={c} > -1.234)",
            "eps * mean({})", "mean({}) / (1 + stop(abs(mean({c}))))", "-mean({})"))
        if call.dims[-1] in fixed and "{t}" in form:
            form = "mean({})"
        return form.format(inside, c=call.text, t=call.dims[-1])

    def _reads(self, model: str) -> list[tuple[Node, Node]]:
        return [pair for pair in self.known.read if pair[0].model == model]

    # ---- evaluation and run

    def _evaluation(self) -> list[str]:
        known = Known(self.known.roots)
        model = next(m for m, role in self.draft.roles.items() if role == "policy")
        self.draft.sampling.add(model)
        t = self._ragged(("e",))
        known.lead[t] = ("e",)
        known.responses.append(Response("z", ("e", t), "generate"))
        self.known.lead.pop(t)
        known.values.append(Node("we", (), ("e",)))
        writer = self._writer(known)
        lines = ['    data pe[e], we[e]: f32 = jsonl("rows.jsonl", "prompt", "weight")',
                 f"    z[e, {t}] = {model}.generate(pe, temperature=0)"]
        lines += [self._bind(known, writer.value(2)), self._metric(known, writer)]
        return ["", self.numbers.choice(("eval(every=1):", "eval:")), *lines]

    def _run(self, lag: int) -> list[str]:
        lines = ["", "run:", "    steps = 2", f"    seed = {self.numbers.randint(0, 99)}"]
        lines += ["    lag = 1"] * lag
        if {"actor", "ref"} <= self.draft.roles.keys():
            action = self.numbers.choice(("", "", "copy(actor, ref)", "ema(actor, ref, 0.9)"))
            lines += [f"    every 1: {action}"] if action else []
        return lines
