"""The figures of the analyses: what each is called, how it is defined, what the paper reports."""

from __future__ import annotations

from typing import NamedTuple

STATE, OTHER_STATE = "s^p", "x"
STATES = {
    STATE: "s^p is the predicted state, what the decoder reads.",
    OTHER_STATE: "x is the last layer's output, before the norm and the head.",
}
"""The vector that the figures are about, in a GPN and in any other model."""


class Figure(NamedTuple):
    """One row of the analyses table."""

    title: str
    paper: str
    """The paper's values, of its one-layer GPN+M with 2496 dimensions; empty where it has none."""
    definition: str


FIGURES = {
    "state_norm": Figure(
        "State norm", "mean 132, sd 9",
        "Norm of s^p over all positions of the text.",
    ),
    "dimension_sd": Figure(
        "Spread of the dimensions", "sd 1.05 to 11.3, none dead",
        "Standard deviation of each dimension of s^p; dead: below 0.001 of the median.",
    ),
    "correlations": Figure(
        "Correlations between dimensions", "mean absolute 0.027, max 0.61",
        "Absolute off-diagonal entries of the correlation matrix, over all pairs of dimensions "
        "that vary.",
    ),
    "components": Figure(
        "Principal components", "229 for 50 %, 1131 for 90 %, 2099 for 99 % of 2496",
        "Eigenvectors of the covariance of the centred states that hold a share of the variance. "
        "With no more states than dimensions the number is bounded by the states.",
    ),
    "effective_ranks": Figure(
        "Effective dimension", "stable rank 40, participation ratio 398",
        "sum(l) / max(l) and sum(l)^2 / sum(l^2) of the covariance eigenvalues l; both 0 for "
        "states that do not vary.",
    ),
    "mean_state": Figure(
        "Mean state", "norm 107; the top principal direction of the uncentred states",
        "s-bar, the mean of s^p over all positions; the cosine is with the top eigenvector of the "
        "uncentred second moment, the share is |s-bar|^2 of E|s^p|^2.",
    ),
    "mean_stability": Figure(
        "Stability of the mean state", "cosine 0.988 +- 0.005 between 8 batches",
        "Cosine between the means of 8 consecutive parts of the states, over all pairs.",
    ),
    "mean_decoded": Figure(
        "Mean state, decoded", "top 10 are function words; Spearman +0.46 with unigram counts",
        "s-bar through the decoder: its most likely tokens, and the rank correlation of its logits "
        "with the token counts of the training split.",
    ),
    "mean_embedding": Figure(
        "Against the mean embedding", "0 of 10 top tokens shared, cosine -0.62",
        "The mean of the embedding's rows, brought to the state by the token projection and "
        "decoded the same way; cosine with s-bar.",
    ),
    "how_soon": Figure(
        "How soon the mean appears", "cosine 0.98 by token 10, 0.996 by token 100",
        "Cosine of s-bar with each window's running mean of s^p from its start, averaged over "
        "windows.",
    ),
    "decoder_bias": Figure(
        "Mean state with a decoder bias", "norm falls by 6 %, from 64.5 to 60.3",
        "Norm of s-bar of this model and of a second one, trained with a bias in the decoder.",
    ),
    "state_horizon": Figure(
        "State horizon", "raw flat near 0.65 to lag 1500; centred 0.31 at lag 1, 0 by lag 256",
        "Mean cosine of s^p_t and s^p_{t+k} by lag k; centred: minus the mean of each window.",
    ),
    "memory_horizon": Figure(
        "Memory horizon", "15 heads: 6 fast (1 to 3 tokens), 9 slow (5 to 322)",
        "Lag where retention, the product of exp(gamma) over the lag, averaged over start "
        "positions, falls to 1/e; fast: under 4 tokens.",
    ),
    "write_strength": Figure(
        "Write strength", "",
        "Mean of beta, in (0, 1), of each head.",
    ),
    "gates": Figure(
        "Openness of the gates", "",
        "Mean of each gate of the state over dimensions and positions; 1 keeps all.",
    ),
    "budget": Figure(
        "Budget of a step", "",
        "Mean norm of what each layer adds up to the next state: carried, FFN, memory read.",
    ),
}  # fmt: skip
