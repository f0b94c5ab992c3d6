"""`groundlm generate` as its user meets it, on a model folder made here."""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from groundlm import GPNConfig, GPNForCausalLM, GPNState, UserError
from groundlm.cli import main
from groundlm.data.tokenizer import train_tokenizer
from groundlm.generation import GenerateConfig, read_prompts, run_generate
from groundlm.interactive import Session
from groundlm.writer import Sampling, Streamer, Writer

TEXT = "the state memory reads a token and writes it back again ground one vector é 日本"
VOCABULARY = 300
PADDED = 310
"""Rows of the model's embedding: more than the tokenizer has entries."""


KINDS = {"memory": {}, "two_layers": {"num_layers": 2}, "no_memory": {"num_heads": 0}}


def tiny_config(vocab_size: int, **sizes: int) -> GPNConfig:
    defaults = {"state_size": 20, "embedding_size": 11, "ffn_size": 23, "num_heads": 3,
                "head_k_dim": 5, "head_v_dim": 7}  # fmt: skip
    return GPNConfig(vocab_size=vocab_size, **(defaults | sizes))


def make_folder(path: Path, seed: int = 5, **sizes: int) -> Path:
    torch.manual_seed(seed)
    model = GPNForCausalLM(tiny_config(PADDED, **sizes))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(path)
    train_tokenizer([TEXT] * 50, VOCABULARY).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def generate(folder, capsys):
    """Runs the command and returns what it printed to stdout."""

    def run(**values: object) -> str:
        run_generate(GenerateConfig(**{"model": str(folder), "max_new_tokens": 8} | values))
        captured = capsys.readouterr()
        run.stderr = captured.err
        return captured.out

    return run


@pytest.fixture
def writer(folder) -> Writer:
    return Writer.load(str(folder), Sampling(8, 0.0), "float32", "cpu")


def test_streams_the_prompt_and_its_continuation(generate, writer):
    out = generate(prompt="the state", temperature=0)
    text = writer.continue_text("the state")
    assert out == "the state" + text.new_text + "\n"
    assert f"{text.new_tokens} new tokens in" in generate.stderr
    assert "tokens/s" in generate.stderr


@pytest.mark.parametrize(
    "off",
    [{"top_k": 0}, {"top_k": 10**6}, {"top_p": 1.0}, {"top_k": VOCABULARY, "top_p": 1.0}],
)
def test_filters_that_are_off(generate, off):
    assert generate(prompt="the", seed=3, **off) == generate(prompt="the", seed=3)


@pytest.mark.parametrize(
    "greedy",
    [
        {"temperature": 0},
        {"temperature": 1e-45},
        {"temperature": 1e-30, "top_p": 0.5},
        {"top_k": 1},
        {"top_p": 0},
        {"temperature": 0, "top_k": 10**6},
    ],
)
def test_filters_that_leave_the_most_likely_only(generate, greedy):
    plain = generate(prompt="the", temperature=0, seed=1)
    assert generate(prompt="the", seed=2, **greedy) == plain


def test_the_seed_decides(generate):
    texts = {generate(prompt="the", seed=seed, max_new_tokens=20) for seed in (1, 2, 3)}
    assert len(texts) == 3
    assert generate(prompt="the", seed=2, max_new_tokens=20) in texts


def test_the_last_seed_is_one(generate):
    assert generate(prompt="the", seed=2**64 - 1) == generate(prompt="the", seed=2**64 - 1)


def test_defaults_of_the_folder_decide_nothing(generate, folder, tmp_path):
    """A penalty or a minimum length that lies there is none of the arguments."""
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    values = {"repetition_penalty": 50.0, "no_repeat_ngram_size": 1, "min_new_tokens": 7}
    GenerationConfig(**values).save_pretrained(copy)
    for sampling in ({"temperature": 0}, {"seed": 3}):
        plain = generate(prompt="the", max_new_tokens=30, **sampling)
        assert generate(model=str(copy), prompt="the", max_new_tokens=30, **sampling) == plain


def test_zero_new_tokens_print_the_prompt_back(generate):
    assert generate(prompt="the  é\n 日本", max_new_tokens=0) == "the  é\n 日本\n"
    assert generate(prompt="", temperature=0, top_k=999999, max_new_tokens=0) == "\n"


def test_an_empty_prompt_starts_with_bos(generate, writer):
    assert writer.encode("") == [writer.tokenizer.bos_token_id]
    writer.tokenizer.bos_token = None
    assert writer.encode("") == [writer.tokenizer.eos_token_id]
    assert len(generate(prompt="", max_new_tokens=30, seed=4)) > 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1: it must be at least 0"),
        ({"top_k": -5}, "top_k is -5"),
        ({"top_p": 1.5}, "top_p is 1.5: it must lie between 0 and 1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"prompt": "a\udcff"}, "no valid Unicode at character 1"),
        ({"seed": 2**64}, "seed is 18446744073709551616: it must be below"),
        ({"interactive": True, "num_samples": 2}, "interactive and num_samples"),
        ({"prompt": "a", "prompts_file": "b"}, "prompt and prompts_file"),
        ({"interactive": True, "prompts_file": "b"}, "interactive and prompts_file"),
    ],
)
def test_bad_values_are_refused_by_name(values, message):
    with pytest.raises(UserError, match=message):
        GenerateConfig("folder", **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "/no/folder"}, "model folder /no/folder does not exist"),
        ({"state_in": "/no/state"}, "state /no/state cannot be read"),
        ({"dtype": "half"}, "unknown dtype 'half'"),
        ({"device": "abacus"}, "device 'abacus' is not available"),
        ({"scan": "magic"}, "unknown scan backend 'magic'"),
        ({"prompts_file": "/no/file"}, "prompts file /no/file cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named(generate, values, message):
    with pytest.raises(UserError, match=message) as caught:
        generate(**values)
    assert "\n" not in str(caught.value)


def test_ids_that_the_model_does_not_know(folder, tmp_path):
    GPNForCausalLM(tiny_config(vocab_size=270)).save_pretrained(tmp_path)
    train_tokenizer([TEXT] * 50, VOCABULARY).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the model's vocabulary has 270"):
        run_generate(GenerateConfig(str(tmp_path), prompt="the state memory reads"))


def test_several_prompts_are_json_lines(generate, writer, tmp_path):
    file = tmp_path / "prompts.txt"
    prompts = ["the state", "", "memory reads é and again"]
    file.write_text("\n".join(prompts) + "\n")
    lines = [json.loads(x) for x in generate(prompts_file=str(file), temperature=0).splitlines()]
    assert [x["prompt"] for x in lines] == prompts
    for line in lines:  # as alone, whatever stands beside it
        assert line["text"] == writer.continue_text(line["prompt"]).new_text
    small = generate(prompts_file=str(file), temperature=0, batch_size=1)
    assert [json.loads(x) for x in small.splitlines()] == lines
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    assert list(read_prompts(jsonl)) == prompts
    several = generate(prompt="the", num_samples=3, max_new_tokens=20).splitlines()
    assert len({json.loads(x)["text"] for x in several}) == 3


def test_prompt_files_that_make_no_sense(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(UserError, match="line 2 is no JSON object"):
        list(read_prompts(file))
    file.write_text("")
    with pytest.raises(UserError, match="is empty"):
        list(read_prompts(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        list(read_prompts(file))
    file.write_text('{"prompt": "a"}\n{"prompt": "b\\ud800"}\n')
    with pytest.raises(UserError, match="line 2 is no valid Unicode at character 1"):
        list(read_prompts(file))
    file.write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match="line 1 is no JSON object"):
        list(read_prompts(file))


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_marks_and_line_ends_of_prompt_files(tmp_path, suffix):
    """A byte order mark is no text; a carriage return ends a line only before a line feed."""
    prompts = ["a\rb", "", " c "]
    lines = prompts if suffix == "txt" else [json.dumps({"prompt": p}) for p in prompts]
    for mark in ("", "\ufeff"):
        for end in ("\n", "\r\n"):
            file = tmp_path / f"p.{suffix}"
            file.write_bytes((mark + end.join(lines) + end).encode())
            assert list(read_prompts(file)) == prompts


def command(folder: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(folder), "--max-new-tokens", "6", *arguments])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_another_encoding(folder, tmp_path, monkeypatch, encoding):
    """Letters that it lacks show as question marks; JSON lines lose nothing."""
    file = tmp_path / "p.txt"
    file.write_text("é\n日本\n")
    outputs = []
    for arguments in (["--prompt", "日本 é"], ["--prompts-file", str(file)]):
        raw = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
        assert command(folder, *arguments) == 0
        sys.stdout.flush()
        outputs.append(raw.getvalue().decode(encoding))
    assert outputs[0].startswith("日本 é" if encoding == "utf-8" else "??")
    assert [json.loads(x)["prompt"] for x in outputs[1].splitlines()] == ["é", "日本"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", str(2**64)], "seed is 18446744073709551616"),
        (["--prompt", "-dash"], "--prompt needs a value; one that begins with a dash is given as"),
        (["--state-out", "/no/folder/s"], "state /no/folder/s cannot be written: No such file"),
        (["--state-out", "/"], "state / cannot be written: Is a directory"),
        (["--interactive", "--num-samples", "2"], "interactive and num_samples"),
    ],
)
def test_one_line_before_the_model_is_loaded(arguments, message, tmp_path, capsys):
    assert command(tmp_path / "none", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_state_of_a_model_of_equal_sizes(folder, tmp_path, capsys):
    other = make_folder(tmp_path / "other", seed=6)
    kept = str(tmp_path / "kept")
    assert command(folder, "--prompt", "the", "--state-out", kept) == 0
    assert command(folder, "--state-in", kept, "--dtype", "bfloat16") == 0
    capsys.readouterr()
    assert command(other, "--state-in", kept) == 2
    assert "of another model: it was written with other weights" in capsys.readouterr().err


def test_padded_ids_are_never_written(folder):
    writer = Writer.load(str(folder), Sampling(200, 50.0), "float32", "cpu")
    torch.manual_seed(0)
    ids = torch.full((4, 1), 5)
    written, _ = writer._generate(ids, torch.ones_like(ids), None, None)
    assert written.max() < VOCABULARY


@pytest.mark.parametrize("counts", [(4, 6), (0, 10), (10, 0), (1, 9)])
def test_a_kept_state_goes_on_where_it_was(generate, tmp_path, counts):
    a, b, c = (str(tmp_path / name) for name in "abc")
    whole = generate(prompt="the state", temperature=0, max_new_tokens=10, state_out=a)
    assert "10 new tokens" in generate.stderr  # no end of text among them
    first = generate(prompt="the state", temperature=0, max_new_tokens=counts[0], state_out=b)
    rest = generate(state_in=b, temperature=0, max_new_tokens=counts[1], state_out=c)
    assert first[:-1] + rest == whole
    one, other = GPNState.load(a), GPNState.load(c)
    torch.testing.assert_close(one.predicted_BD, other.predicted_BD)
    assert torch.equal(one.tokens_seen, other.tokens_seen)
    assert torch.equal(one.text_hash_B, other.text_hash_B)
    text = generate(state_in=b, prompt=" memory", temperature=0)
    assert text.startswith(" memory")


def test_states_of_a_batch_are_those_of_its_texts(folder, generate, tmp_path):
    writer = Writer.load(str(folder), Sampling(6, 0.0), "float32", "cpu")
    prompts = ["the state", "memory"]
    ids = torch.tensor([writer.tokenizer("the state")["input_ids"]])
    plain, _ = writer._generate(ids, torch.ones_like(ids), None, None)
    # Let the text of the first row end three tokens before that of the second.
    writer.tokenizer.eos_token = writer.tokenizer.convert_ids_to_tokens(int(plain[0, -4]))
    for text in writer.continue_batch(prompts, keep_state=True):
        alone = writer.continue_text(text.prompt, keep_state=True)
        assert text.new_text == alone.new_text
        assert text.new_tokens == alone.new_tokens
        torch.testing.assert_close(text.state.predicted_BD, alone.state.predicted_BD)
        assert torch.equal(text.state.tokens_seen, alone.state.tokens_seen)
        ids = writer.tokenizer(text.prompt)["input_ids"]
        assert int(text.state.tokens_seen) == len(ids) + text.new_tokens
    many = str(tmp_path / "many")
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    generate(prompts_file=str(file), state_out=many, temperature=0)
    assert GPNState.load(many).batch_size == 2
    nothing = tmp_path / "nothing.txt"
    nothing.write_text("\n\n")  # two empty prompts on two kept states
    lines = generate(prompts_file=str(nothing), state_in=many, temperature=0).splitlines()
    assert len(lines) == 2
    with pytest.raises(UserError, match="state_in has 2 rows, there are 1 prompts"):
        generate(prompt="a", state_in=many)


def test_only_texts_that_ended_early_are_read_again(folder, monkeypatch):
    writer = Writer.load(str(folder), Sampling(6, 0.0), "float32", "cpu")
    prompt = "the state memory reads a token and writes it back again"
    width = len(writer.encode(prompt))
    texts = [prompt, "memory", "é and again"]
    plain = [t.new_text for t in writer.continue_batch(texts)]
    ids = torch.tensor([writer.encode("memory")])
    written, _ = writer._generate(ids, torch.ones_like(ids), None, None)
    writer.tokenizer.eos_token = writer.tokenizer.convert_ids_to_tokens(int(written[0, -4]))
    shapes = []
    forward = writer.gpn.model.forward

    def watched(input_ids, *args, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(writer.gpn.model, "forward", watched)
    states = [t.state for t in writer.continue_batch(texts, keep_state=True)]
    long_reads = [rows for rows, columns in shapes if columns >= width]
    ended = sum(writer.continue_text(t).new_text != p for t, p in zip(texts, plain, strict=True))
    assert 0 < ended < 3
    assert long_reads == [3, ended]  # the prompts, then the texts that ended
    for text, state in zip(texts, states, strict=True):
        alone = writer.continue_text(text, keep_state=True).state
        torch.testing.assert_close(state.predicted_BD, alone.predicted_BD)
        assert torch.equal(state.tokens_seen, alone.tokens_seen)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_and_branches(kind, tmp_path, generate, monkeypatch):
    model = str(make_folder(tmp_path / "model", **KINDS[kind]))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    greedy = {"model": model, "temperature": 0}
    whole = generate(prompt="the state", max_new_tokens=10, **greedy)
    first = generate(prompt="the state", max_new_tokens=4, state_out=a, **greedy)
    assert first[:-1] + generate(state_in=a, max_new_tokens=6, **greedy) == whole
    file = tmp_path / "prompts.txt"
    file.write_text("the state\nmemory reads\n")
    lines = generate(prompts_file=str(file), state_out=b, **greedy).splitlines()
    assert [json.loads(x)["text"] for x in lines] == [
        generate(prompt=p, **greedy)[len(p) : -1] for p in ("the state", "memory reads")
    ]
    assert GPNState.load(b).batch_size == 2
    monkeypatch.setattr("sys.stdin", io.StringIO(f":load {a}\n:branch x\n\n:branch x\n:state\n"))
    out = generate(interactive=True, max_new_tokens=6, state_out=b, **greedy)
    rest = whole[len(first) - 1 : -1]
    assert f"kept as x\n{rest}\nback at x\nnorm" in out
    assert ("memory norm" in out) == (kind != "no_memory")
    assert torch.equal(GPNState.load(b).predicted_BD, GPNState.load(a).predicted_BD)


def test_another_model_type(tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    train_tokenizer([TEXT] * 50, VOCABULARY).save_pretrained(tmp_path)
    run_generate(GenerateConfig(str(tmp_path), prompt="the", max_new_tokens=3))
    assert capsys.readouterr().out.startswith("the")
    with pytest.raises(UserError, match="need a gpn, this model is a llama"):
        run_generate(GenerateConfig(str(tmp_path), prompt="the", state_out="x"))


def test_damaged_weights_are_reported(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(UserError, match="is damaged"):
        run_generate(GenerateConfig(str(tmp_path), prompt="the"))


def test_interactive_session(folder, generate, monkeypatch, tmp_path, writer):
    kept = tmp_path / "kept"
    lines = [
        "the state", ":branch here", "", ":branch here", "", ":branch", f":save {kept}", ":state",
        ":load /no/file", ":load", ":dance", f":load {kept}", " memory", ":help", ":quit", "unread",
    ]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    out = generate(interactive=True, temperature=0)
    first = writer.continue_text("the state", keep_state=True)
    second = writer.continue_text("", first.state, keep_state=True)
    expected = first.new_text + "\nkept as here\n" + second.new_text + "\nback at here\n"
    assert out.startswith(expected + second.new_text + "\nkept: here\n")
    assert GPNState.load(kept).tokens_seen.item() == second.state.tokens_seen.item()
    norm = f"norm {second.state.predicted_BD.norm():.4g}"
    assert f"{norm}, memory norm" in out
    assert f"tokens seen {second.state.tokens_seen.item()}\n" in out
    assert "error: state /no/file cannot be read" in out
    assert "error: :load needs a file name" in out
    assert "error: unknown command :dance" in out
    third = writer.continue_text(" memory", second.state)
    assert third.new_text + "\nType text" in out
    assert "unread" not in out


def test_a_session_writes_its_last_state(generate, monkeypatch, tmp_path, writer):
    kept = tmp_path / "kept"
    for lines in ("the state\n\n", "the state\n\n:quit\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        generate(interactive=True, temperature=0, state_out=str(kept))
        first = writer.continue_text("the state", keep_state=True)
        second = writer.continue_text("", first.state, keep_state=True)
        assert torch.equal(GPNState.load(kept).predicted_BD, second.state.predicted_BD)
        kept.unlink()


def test_ctrl_c_keeps_the_session(generate, monkeypatch, tmp_path, writer):
    """In a continuation it costs that line; at the prompt it ends the session as `:quit` does."""
    kept = tmp_path / "kept"

    class Typing(io.StringIO):
        def readline(self, *args):
            line = super().readline(*args)
            if not line:
                raise KeyboardInterrupt
            return line

    written = Streamer._print

    def interrupted(streamer, text):
        written(streamer, text)
        if "memory" in present["line"]:
            raise KeyboardInterrupt

    present = {"line": ""}
    go_on = Session.go_on
    monkeypatch.setattr(
        Session, "go_on", lambda s, text, out: (present.update(line=text), go_on(s, text, out))
    )
    monkeypatch.setattr(Streamer, "_print", interrupted)
    monkeypatch.setattr("sys.stdin", Typing("the state\n memory\n:state\n"))
    out = generate(interactive=True, temperature=0, state_out=str(kept))
    first = writer.continue_text("the state", keep_state=True).state
    assert "stopped: back to the state before this line\nnorm" in out
    assert f"tokens seen {int(first.tokens_seen)}" in out
    assert torch.equal(GPNState.load(kept).predicted_BD, first.predicted_BD)


def test_only_tokens_that_can_be_written_are_listed(folder, writer, monkeypatch):
    monkeypatch.setattr("groundlm.interactive.TOP", PADDED + 1)
    state = writer.continue_text("the", keep_state=True).state
    out = io.StringIO()
    Session(writer, state).command(":state", out)
    lines = out.getvalue().splitlines()[1:]
    shares = [float(line.split("%")[0]) for line in lines]
    assert len(shares) == VOCABULARY
    assert abs(sum(shares) - 100) < 1.5
