"""E05: params, overrides, settings."""

from rlhf_dsl.codes.code import Code

_POLICY = 'model m = policy("builtin:tiny")\n'

CODES: tuple[Code, ...] = (
    Code(
        "E0501", "the param `{name}` is {value}, outside {range}",
        "A param may have a range; a round bracket leaves its end out. It holds for the default and for `-s "
        "{name}=...`.",
        "choose a value in {range}", "param eps = 1.5 in (0, 1)", "param eps = 0.2 in (0, 1)",
    ),
    Code(
        "E0502", "`{name}` cannot be overridden: there is no such dim, param or setting",
        "`-s name=value` sets a dim, a param or one of `run.steps`, `run.epochs`, `run.seed`, `run.lag`.",
    ),
    Code(
        "E0503", "`{name}` needs {wanted}, not `{value}`",
        "An override has the type of the value that it replaces.",
        "write {wanted} behind `-s {name}=`",
    ),
    Code(
        "E0504", "this is not known before the run",
        "Declarations and settings are made of numbers, texts, dims, params and arithmetic over them. Data, states and "
        "model outputs belong in sections.",
        "write a number, a param, or arithmetic over them; what varies is bound in a section",
        "state x = 0.0 then x\nparam a = x", "param c = 1\nparam a = c + 1",
    ),
    Code(
        "E0505", "the range of `{name}` fits no value: {reason}",
        "A range holds numbers, from its lower to its upper end.",
        "write two numbers, the smaller one first: `in [0, 1]`",
        "param eps = 0.2 in (1, 0)", "param eps = 0.2 in (0, 1)",
    ),
    Code(
        "E0506", "`{where}` has no setting `{name}`",
        "Each section has a fixed list of settings.",
        "", "run:\n    step = 10", "run:\n    steps = 10",
    ),
    Code(
        "E0507", "`{name}` is {rule}, not `{value}`",
        "A setting has a kind and a range.",
        "give it {rule}, or leave `{name}` out",
        "run:\n    steps = 0.5", "run:\n    steps = 5",
    ),
    Code(
        "E0508", "`{name}` and `{other}` are given both",
        "A run has a number of steps or of passes over its data; any setting is given once.",
        "leave one out", "run:\n    steps = 5\n    epochs = 1", "run:\n    steps = 5",
    ),
    Code(
        "E0509", "unknown action `{name}`",
        "Every so many iterations a program may `save(model)`, `copy(from, to)` or take the moving average `ema(from, "
        "to, 0.99)`.",
        "", _POLICY + "run:\n    every 5: store(m)", _POLICY + "run:\n    every 5: save(m)",
    ),
    Code(
        "E0510", "unknown stage `{name}`",
        "The stages of a model in a plan are `train`, `forward` and `generate`.",
        "", _POLICY + "plan:\n    m.sample: parallel(tp=2)", _POLICY + "plan:\n    m.generate: parallel(tp=2)",
    ),
    Code(
        "E0511", "`{model}` has no stage `{stage}`: {reason}",
        "Only a model with an optimizer is trained, only a policy generates.",
        "leave the line out, or name another stage",
        _POLICY + "plan:\n    m.train: parallel(tp=2)", _POLICY + "plan:\n    m.forward: parallel(tp=2)",
    ),
)

