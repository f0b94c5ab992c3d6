"""The interactive mode of `groundlm generate`: type, let it go on, keep and revisit states."""

from __future__ import annotations

from typing import TextIO

import torch

from groundlm.errors import UserError
from groundlm.model.state import GPNState
from groundlm.writer import Writer

HELP = """\
Type text and press Enter: it is read as it stands, and the model goes on from it.
An empty line lets the model go on without new text.
  :save FILE    write the state to FILE
  :load FILE    go on from the state in FILE
  :branch NAME  keep this point under NAME; if NAME is kept already, return to it
  :branch       list the names kept
  :state        norm of the state, tokens seen, most likely next tokens
  :help         this text
  :quit         leave (so does the end of input)
Ctrl-C stops a continuation and returns to the state before its line."""

TOP = 5
"""Most likely next tokens that `:state` lists."""


class Session:
    """One conversation: the present state and the points kept by name."""

    def __init__(self, writer: Writer, state: GPNState | None = None, prompt: str = "") -> None:
        if state is not None and state.batch_size != 1:
            raise UserError(f"the interactive mode goes on from one row, not {state.batch_size}")
        self.writer = writer
        self.state = state
        self.prompt = prompt
        self.branches: dict[str, GPNState | None] = {}

    def run(self, lines: TextIO, out: TextIO) -> None:
        """Read lines until `:quit`, their end or Ctrl-C; a mistake costs one line, nothing else."""
        if self.prompt:
            out.write(self.prompt)
            self.go_on(self.prompt, out)
        while True:
            if lines.isatty():
                out.write("> ")
            out.flush()
            try:
                line = lines.readline()
            except KeyboardInterrupt:
                out.write("\n")
                return
            if not line:
                return
            line = line.removesuffix("\n").removesuffix("\r")
            try:
                if not line.startswith(":"):
                    self.go_on(line, out)
                elif self.command(line, out):
                    return
            except UserError as error:
                print(f"error: {error}", file=out)

    def go_on(self, text: str, out: TextIO) -> None:
        """Read the text, then write on; Ctrl-C stops it and leaves the state as it was."""
        try:
            self._continue(text, out)
        except KeyboardInterrupt:
            print("\nstopped: back to the state before this line", file=out)

    def _continue(self, text: str, out: TextIO) -> None:
        written = self.writer.continue_text(text, self.state, stream=out, keep_state=True)
        self.state = written.state
        out.write("\n")

    def command(self, line: str, out: TextIO) -> bool:
        """Carry out a line that starts with a colon; True ends the session."""
        word, _, argument = line.partition(" ")
        argument = argument.strip()
        if word in (":save", ":load") and not argument:
            raise UserError(f"{word} needs a file name")
        if word == ":save":
            self.writer.save_state(self.present(), argument)
            print(f"saved to {argument}", file=out)
        elif word == ":load":
            state = self.writer.load_state(argument)
            if state.batch_size != 1:
                raise UserError(f"{argument} holds {state.batch_size} rows: one is needed")
            self.state = state
            print(f"at {int(state.tokens_seen[0])} tokens", file=out)
        elif word == ":branch":
            self._branch(argument, out)
        elif word == ":state":
            self._describe(out)
        elif word == ":help":
            print(HELP, file=out)
        elif word == ":quit":
            return True
        else:
            raise UserError(f"unknown command {word}; :help lists them")
        return False

    def _branch(self, name: str, out: TextIO) -> None:
        if not name:
            print("kept: " + (", ".join(self.branches) or "nothing"), file=out)
        elif name in self.branches:
            self.state = self.branches[name]
            print(f"back at {name}", file=out)
        else:
            self.branches[name] = self.state
            print(f"kept as {name}", file=out)

    def present(self) -> GPNState:
        """The state that the next line is read on top of."""
        return self.writer.gpn.model.zero_state(1) if self.state is None else self.state

    @torch.inference_mode()
    def _describe(self, out: TextIO) -> None:
        state = self.present()
        norms = f"norm {state.predicted_BD.norm():.4g}"
        if state.memory_BHKV is not None:
            norms += f", memory norm {state.memory_BHKV.norm():.4g}"
        print(f"{norms}, tokens seen {int(state.tokens_seen[0])}", file=out)
        logits_W = self.writer.gpn.next_logits(state)[0]
        unused = self.writer.unused_ids()
        logits_W[unused] = -torch.inf
        shares, ids = logits_W.softmax(-1).topk(min(TOP, len(logits_W) - len(unused)))
        for share, token in zip(shares.tolist(), ids.tolist(), strict=True):
            print(f"  {share:7.2%}  {self.writer.tokenizer.decode([token])!r}", file=out)
