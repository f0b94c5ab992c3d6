"""lm-evaluation-harness on our models (extra `harness`).

    python -m groundlm.evaluation.harness --model groundlm --model_args pretrained=DIR --tasks TASK

is the harness's own command line with two things more: its model `hf` knows GPN checkpoints, and
its model `groundlm` reads texts as training did (see `TextEncoder`), from any model folder.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from groundlm.data.tokenizer import load_tokenizer
from groundlm.errors import UserError
from groundlm.evaluation.continuations import score_continuations
from groundlm.evaluation.scoring import check_scorable, context_limit, vocabulary_rows
from groundlm.evaluation.text import TextEncoder
from groundlm.model.loading import load_model
from groundlm.models import resolve_device

try:
    import lm_eval.models  # noqa: F401 - its own models, which are looked for in an empty list only
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise UserError(
        f"lm-evaluation-harness is not installed ({error}): pip install 'groundlm[harness]'"
    ) from None

MAX_NEW_TOKENS = 256
"""Tokens that a task generates at most when it names no number."""
SAMPLING = ("temperature", "top_k", "top_p")


@register_model("groundlm")
class HarnessModel(LM):
    """A model folder as the harness sees it."""

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 16,
        max_length: int | None = None,
        device: str | None = None,
        dtype: str = "float32",
        max_batch_size: int | None = None,
    ) -> None:
        """
        Args:
            pretrained: model folder with its tokenizer.
            batch_size: texts read side by side; `auto` is 16. It changes scores by rounding only.
            max_length: read at most so many tokens before a scored one. None: the model's own
                limit, which a recurrent model does not have.
            device, dtype: as for `groundlm eval`.
            max_batch_size: not used; the harness passes it.

        Raises:
            UserError: a folder, device or dtype that cannot be used, a model that cannot be scored.
        """
        super().__init__()
        self.model = load_model(pretrained, dtype, resolve_device(device or "auto"))
        check_scorable(self.model)
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(pretrained)
        self.encoder = TextEncoder(self.tokenizer, vocabulary_rows(self.model))
        self.batch_size = 16 if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = context_limit(self.model) if max_length is None else int(max_length)

    @property
    def tokenizer_name(self) -> str:
        """Names the cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Summed log-probability of each continuation, and whether all of it is the top choice."""
        pairs = [self.encoder.encode_pair(*request.args) for request in requests]
        scored = score_continuations(self.model, pairs, self.batch_size, self.max_length)
        results = [(x.log_likelihood, bool(x.is_top.all())) for x in scored]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text after the prefix, every token scored once."""
        texts = [self.encoder.encode(request.args[0]) for request in requests]
        pairs = [([self.encoder.prefix_id], ids) for ids in texts if ids]
        scored = iter(score_continuations(self.model, pairs, self.batch_size, self.max_length))
        results = [next(scored).log_likelihood if ids else 0.0 for ids in texts]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to the first of its stop strings, which is left out."""
        results = []
        for request in requests:
            context, options = request.args
            result = self._continue(context, dict(options))
            self.cache_hook.add_partial("generate_until", request.args, result)
            results.append(result)
        return results

    def _continue(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        new_tokens = int(options.get("max_gen_toks") or MAX_NEW_TOKENS)
        ids = [self.encoder.prefix_id, *self.encoder.encode(context)]
        if self.max_length is not None:
            ids = ids[-max(1, self.max_length - new_tokens) :]
        sampling = {name: options[name] for name in SAMPLING if options.get(name)}
        if not options.get("do_sample", "temperature" in sampling):
            sampling = {}
        inputs = torch.tensor([ids], device=self.model.device)
        out = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            do_sample=bool(sampling),
            stopping_criteria=[StopStringCriteria(self.tokenizer, stops)] if stops else None,
            eos_token_id=self.encoder.prefix_id,
            pad_token_id=self.encoder.prefix_id,
            **sampling,
        )
        text = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text


def main() -> None:
    """The harness's own command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
