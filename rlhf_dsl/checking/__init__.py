"""The checker, one idea a file. `rlhf_dsl.check.check` is its only entrance."""
