"""The sizes of a Grounded Prediction Network."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from groundlm.errors import UserError


@strict
class GPNConfig(PreTrainedConfig):
    """Configuration of a Grounded Prediction Network, with (GPN+M) or without memory.

    The defaults are the paper's headline model: GPN+M, one layer, 129,151,902 parameters.
    `num_heads=0` is the GPN without memory. Raises `UserError` for sizes no model can have.
    """

    model_type = "gpn"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012 - transformers reads a plain list
    # The names under which generic transformers code asks for the same sizes.
    attribute_map = {  # noqa: RUF012
        "hidden_size": "state_size",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_size",
        "num_attention_heads": "num_heads",
    }

    vocab_size: int = 32000
    """Entries of the vocabulary (W)."""
    state_size: int = 2496
    """Width of the state vector (D)."""
    embedding_size: int = 768
    """Width of the token embedding (E), tied between input and decoder."""
    ffn_size: int = 6656
    """Inner width of the feed-forward network (F)."""
    num_layers: int = 1
    """Predict layers per token (L), all reading the same memory."""
    num_heads: int = 15
    """Heads of the shared matrix memory (H); 0 builds a GPN without memory."""
    head_k_dim: int = 128
    """Key width per head (K)."""
    head_v_dim: int = 256
    """Value width per head (V)."""
    decoder_bias: bool = False
    """Give the decoder a bias of its own (E wide), the paper's control for the default token."""
    norm_eps: float = 1e-6
    """Added to the mean square inside every RMS norm."""
    initializer_range: float = 0.02
    """Standard deviation of the embedding and of the read's output matrix at the start."""
    use_cache: bool = True
    """Return the final state with every call."""
    tie_word_embeddings: bool = True
    """The decoder shares the embedding; the architecture has no untied form."""
    bos_token_id: int | None = None
    """Token that starts a text, if the tokenizer has one."""
    eos_token_id: int | list[int] | None = None
    """Token that ends a document."""
    pad_token_id: int | None = None
    """Token that fills short rows of a batch."""

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        positive = ["vocab_size", "state_size", "embedding_size", "ffn_size", "num_layers"]
        if self.num_heads:
            positive += ["head_k_dim", "head_v_dim"]
        for name in positive:
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_heads < 0:
            raise UserError(f"model.num_heads is {self.num_heads}: it must be 0 or more")
        if not self.tie_word_embeddings:
            raise UserError("model.tie_word_embeddings is false: a GPN decoder is always tied")

    @property
    def memory_cells(self) -> int:
        """Numbers held by the memory of one sequence (H * K * V)."""
        return self.num_heads * self.head_k_dim * self.head_v_dim
