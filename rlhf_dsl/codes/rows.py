"""R03: rows of data, their tokens, and Python ops on them, at run time."""

from rlhf_dsl.codes.code import Code

_BAD_FILE = 2

CODES: tuple[Code, ...] = (
    Code(
        "R0300", "data cannot be read: {reason}",
        "A `data` declaration names a file or folder that is not there or is not what its kind says. Paths are relative to "
        "the folder of the program. `jsonl` reads one JSON object a line, `parquet` one Parquet file, `hf` a local folder "
        "with the Parquet or JSONL files of a data set.",
        "paths of data are relative to the program's folder", status=_BAD_FILE),
    Code(
        "R0301", "not a row of JSON: {reason}",
        "In a `jsonl` file each line is one JSON object, whose keys are the columns. Blank lines are skipped.",
        'each line is one object, like {{"prompt": "2+3=", "answer": "5"}}', status=_BAD_FILE),
    Code(
        "R0302", "no column `{column}`",
        "Every row must have each column that the program reads.", "the columns here are {known}", status=_BAD_FILE),
    Code(
        "R0303", "column `{column}` holds {value}, not {wanted}",
        "Columns are text unless the program annotates them with `f32` or `bool`. A missing value (null) is of no type; a "
        "number must be finite.",
        "annotate the column with its type (`x[b]: f32`) or correct the row", status=_BAD_FILE),
    Code(
        "R0304", "the data has no rows",
        "A root dim reads the rows of its source over and over; of none it cannot make a batch.",
        "give a file with at least one row", status=_BAD_FILE),
    Code(
        "R0305", "`dim {dim} = {wanted}` reads the first {wanted} rows, but there are {size}",
        "An `eval` section reads the first rows of its data in file order, each of them once.",
        "set `dim {dim} = {size}` or add rows", status=_BAD_FILE),
    Code(
        "R0310", "the tokenizer cannot be read: {reason}",
        "A model folder holds its tokenizer as `tokenizer.json` with `tokenizer_config.json`, or in an older format that "
        "`transformers` can convert.",
        "put the tokenizer's files beside the model's", status=_BAD_FILE),
    Code(
        "R0311", "the tokenizer has no end token",
        "A response read from data is closed by one end token, so that the model learns to stop.",
        "set `eos_token` in tokenizer_config.json", status=_BAD_FILE),
    Code(
        "R0312", "the chat template fails on a single user message: {reason}",
        "A prompt goes through the tokenizer's chat template as one message of the user, with the generation prompt.",
        "correct the template, or remove it to use the plain text of the prompt", status=_BAD_FILE),
    Code(
        "R0313", "the prompt of row {row} has {tokens} tokens, which leaves none of the context of {context} for a response",
        "A prompt and at least one token of its response must fit the model's context.",
        "shorten or remove the prompt (rows count from 0 in stream order), or use a model with a longer context"),
    Code(
        "R0314", "the prompt of row {row} has no tokens",
        "The first token of a response is predicted from the token before it. A tokenizer without a start token makes "
        "nothing of an empty text.",
        "remove the empty prompt (rows count from 0 in stream order), or use a tokenizer with a `bos_token`"),
    Code(
        "R0315", "{what} has {tokens} tokens, the context of `{model}` is {context}",
        "A model computes positions up to its context, `max_position_embeddings` of its config. A prompt must leave room for "
        "at least one token of a response; a response from data must fit as a whole, after it was cut to the bound of its dim.",
        "shorten or remove the row, lower the bound of the response, or use a model with a longer context", status=_BAD_FILE),
    Code(
        "R0316", "`{reader}.{operation}` cannot read what `{writer}` wrote: their tokenizers differ",
        "A model reads the tokens of a response as they were written, so both need the same tokenizer. Only `score` of a "
        "scorer takes the text instead, and encodes it with a tokenizer and template of its own.",
        "use models with one tokenizer, or `score` of a scorer", status=_BAD_FILE),
    Code(
        "R0317", "a prompt with its response may have {tokens} tokens, for which generation needs {needed} of its {cache}",
        "Keys and values of all tokens of a row are kept while it is sampled. The memory for them is what the plan leaves of "
        "the device's, or a gigabyte where no cluster is described; it must hold one row as long as any may become.",
        "lower the bound of the response, spread generation over more ranks (`parallel(tp=..)` of `generate`), or let the plan "
        "keep less on these ranks"),
    Code(
        "R0320", "`{op}` cannot be loaded: {reason}",
        "At run time the module of a Python op is imported in worker processes, from the package root that the program "
        "found it in.",
        "import the module in a Python session started in the program's folder"),
    Code(
        "R0321", "`{op}` raised {error} on row {row}",
        "A Python op that raises stops the run, unless its decorator says what a failed row is worth.",
        "correct the function, or give failed rows a value: `@op(on_error=0.0)`"),
    Code(
        "R0322", "`{op}` took more than {timeout:g} s on row {row}",
        "A call of a Python op has a time limit, `@op(timeout=seconds)`; the worker is ended and started again.",
        "raise the limit with `@op(timeout=...)`, or give failed rows a value: `@op(on_error=0.0)`"),
    Code(
        "R0323", "`{op}` returned {value} on row {row}, not {wanted}",
        "What an op returns must be of the type that its annotation promises, and NaN is no number.",
        "correct the function, or give failed rows a value: `@op(on_error=0.0)`"),
    Code(
        "R0324", "the worker of `{op}` died on row {row} ({reason})",
        "The function ended its process: `sys.exit`, a crash in native code, or the system ran out of memory.",
        "run the function on this row by itself, or give failed rows a value: `@op(on_error=0.0)`"),
)
